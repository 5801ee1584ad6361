/* support_layout.h: the tiny qwen3next model as a file of architecture qwen35moe: the same network with value heads in tiled
 * order and beta and alpha apart. */
#ifndef LH_TESTS_SUPPORT_LAYOUT_H
#define LH_TESTS_SUPPORT_LAYOUT_H

void write_as_qwen35moe(const char *path);

#endif
