/* tensor.h: weights as the decoder and the kernels see them. Records only; no ownership. */
#ifndef LH_CORE_TENSOR_H
#define LH_CORE_TENSOR_H

#include <stddef.h>
#include <stdint.h>

/* Where a tensor lies in its file. Part of struct model: shapes and offsets, no pointers. A slice of a fused or stacked
 * tensor (q of attn_qkv, one expert) is the same record with other rows and offset, since rows are contiguous. */
struct tensor {
    int type;        /* enum quant_type of core/quant.h */
    int64_t rows;    /* output features of a matrix (dims[1]); 1 for a vector */
    int64_t cols;    /* input features (dims[0], the fastest-varying one) */
    int64_t stack;   /* experts of a stacked tensor (dims[2]), else 1 */
    int shard;       /* file of a split model */
    uint64_t offset; /* first byte, from the start of that file */
    size_t bytes;    /* stack * rows * row bytes; 0: the tensor is absent */
    size_t stride;   /* from one matrix of the stack to the next in the file: bytes / stack, more for a slice of a stack
                        whose matrices hold other rows too (ffn_gate_up_exps) */
    int64_t group;       /* rows that follow each other in the file; 0: all of them. Otherwise the rows interleave with those */
    size_t group_stride; /* of another matrix, head by head: bytes from one group of rows to the next */
};

/* A matrix in its home: y[rows] = W[rows, cols] x[cols]. Bytes are in the strip layout of core/strip.h. */
struct mat {
    const void *data; /* host or device address, whichever back end it is for; NULL: absent (also in dry runs) */
    int type;         /* enum quant_type */
    int64_t rows, cols;
};

#endif
