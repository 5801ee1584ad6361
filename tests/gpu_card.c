/* gpu_card.c: part of every test that is built for a device. Ends it before it begins, as skipped, where there is no card: the
 * tests themselves need not ask. A driver that does not work is a failure. */
#include "core/err.h"
#include "gpu/gpu.h"

#include <stdio.h>
#include <stdlib.h>

__attribute__((constructor)) static void need_card(void) {
    int n = 0;
    if (gpu_count(&n)) {
        printf("%s\n", err_text());
        exit(1);
    }
    if (n) return;
    printf("skipped: no GPU found\n");
    exit(77);
}
