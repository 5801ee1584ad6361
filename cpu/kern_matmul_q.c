/* kern_matmul_q.c: tiles of the types with blocks of 32 and 64. */
#include "cpu/tile.h"

TILE_DEFINE(Q4_0)
TILE_DEFINE(Q4_1)
TILE_DEFINE(Q5_0)
TILE_DEFINE(Q5_1)
TILE_DEFINE(Q8_0)
TILE_DEFINE(IQ4_NL)
TILE_DEFINE(MXFP4)
TILE_DEFINE(NVFP4)
