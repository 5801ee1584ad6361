/* ref_delta.h: the Gated DeltaNet layer of core/ops.h, token by token in double. */
#ifndef LH_TESTS_REF_DELTA_H
#define LH_TESTS_REF_DELTA_H

#include "core/ops.h"

/* S^T of one head [n_row, dim], row by row; q and k [dim] as they are multiplied, v and o [n_row]. */
void ref_delta_step(double *s, double *o, const double *q, const double *k, const double *v, double g, double beta, int n_row, int dim);

/* struct delta_args with y, last and s in double: y [n_tok, n_value, dim], last [n_conv - 1, conv_dim], s [n_value, dim, dim]
 * take the place of a->y, a->last and a->s. a->u is read only. */
void ref_delta(double *y, double *last, double *s, const struct delta_args *a);

#endif
