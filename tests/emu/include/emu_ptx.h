/* emu_ptx.h: operands of the matrix instructions as the emulator's leader functions get them (tests/emu/matrix.cpp).
 * A lane deposits the address of its record; the last lane computes all results through the 32 addresses.
 * Register layouts are those of the PTX ISA. */
#ifndef EMU_PTX_H
#define EMU_PTX_H

#include <stdint.h>

namespace emu {

struct ldmatrix_args {
    const void *row; /* 16 bytes of shared memory: row lane % 8 of matrix lane / 8 */
    uint32_t *r;     /* [n] */
    int n;           /* 1, 2, 4 matrices of 8 x 8 b16 */
    bool trans;
};

enum mma_shape { MMA_F16_16816, MMA_F16_1688, MMA_BF16_16816, MMA_S8_16832, MMA_S8_16816, MMA_S8_8816 };
struct mma_args { /* d += a b */
    mma_shape shape;
    void *d; /* float or int32 [4], [2] for 8816 */
    const uint32_t *a, *b;
};

enum wmma_what { WMMA_MMA, WMMA_SYNC };
enum wmma_type { WMMA_HALF, WMMA_BF16, WMMA_FLOAT };
struct wmma_args { /* 16x16x16: lane l holds elements 8 l .. 8 l + 7 of each row-major matrix */
    wmma_what what;
    wmma_type in, out;
    const void *a, *b, *c;
    void *d;
};

} // namespace emu
#endif
