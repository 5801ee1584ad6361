/* lp.h: small linear programs, exactly: minimise c.x over x >= 0 with rows a.x <=, =, >= b. Dense two-phase simplex; a
 * few dozen variables take microseconds. Pure, thread-safe. */
#ifndef LH_OFFLOAD_LP_H
#define LH_OFFLOAD_LP_H

enum { LP_VARS = 24, LP_ROWS = 48 };
enum lp_sense { LP_LE, LP_EQ, LP_GE };

struct lp {
    int n, m;                     /* variables, rows */
    double c[LP_VARS];
    double a[LP_ROWS][LP_VARS], b[LP_ROWS];
    enum lp_sense sense[LP_ROWS];
};

/* Appends a row of zeros and returns its number. There must be room. */
int lp_row(struct lp *p, enum lp_sense sense, double b);

enum lp_result { LP_SOLVED, LP_INFEASIBLE, LP_FAILED }; /* failed: unbounded, or no end in sight */
enum lp_result lp_solve(double x[LP_VARS], const struct lp *p);

#endif
