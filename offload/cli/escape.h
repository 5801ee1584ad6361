/* escape.h: backslash escapes in texts given on the command line. */
#ifndef LH_OFFLOAD_CLI_ESCAPE_H
#define LH_OFFLOAD_CLI_ESCAPE_H

#include <stddef.h>

/* Replaces \n \r \t \' \" \\ and \xHH in place, leaves other ones as they are, and returns the new length (\x00 makes a
 * NUL inside). The result is NUL-terminated. */
size_t cli_unescape(char *s);

#endif
