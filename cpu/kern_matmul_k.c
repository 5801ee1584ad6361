/* kern_matmul_k.c: tiles of the types with blocks of 256. */
#include "cpu/tile.h"

TILE_DEFINE(Q2_K)
TILE_DEFINE(Q3_K)
TILE_DEFINE(Q4_K)
TILE_DEFINE(Q5_K)
TILE_DEFINE(Q6_K)
TILE_DEFINE(IQ4_XS)
TILE_DEFINE(TQ2_0)
