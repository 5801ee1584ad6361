/* lp.c: see lp.h. */
#include "offload/lp.h"

#include <math.h>
#include <string.h>

enum { COLS = LP_VARS + 2 * LP_ROWS + 1, MAX_STEPS = 2000, DANTZIG_STEPS = 200 };
static const double tiny = 1e-9;

/* Rows are basic variables; the last column is their value, row m the reduced costs. */
struct tableau {
    double t[LP_ROWS + 1][COLS];
    int basic[LP_ROWS];
    int m, n_col; /* columns without the last */
};

int lp_row(struct lp *p, enum lp_sense sense, double b) {
    int r = p->m++;
    memset(p->a[r], 0, sizeof p->a[r]);
    p->sense[r] = sense;
    p->b[r] = b;
    return r;
}

static void pivot(struct tableau *s, int row, int col) {
    double d = 1 / s->t[row][col];
    for (int j = 0; j <= s->n_col; j++) s->t[row][j] *= d;
    s->t[row][col] = 1;
    for (int i = 0; i <= s->m; i++) {
        double f = s->t[i][col];
        if (i == row || f == 0) continue;
        for (int j = 0; j <= s->n_col; j++) s->t[i][j] -= f * s->t[row][j];
        s->t[i][col] = 0;
    }
    s->basic[row] = col;
}

/* The row whose variable reaches zero first; among equals the lowest variable, so that no cycle is possible. -1: none. */
static int leaving(const struct tableau *s, int col) {
    int best = -1;
    double least = INFINITY;
    for (int i = 0; i < s->m; i++) {
        if (s->t[i][col] <= tiny) continue;
        double ratio = s->t[i][s->n_col] / s->t[i][col];
        if (ratio < least - tiny || (ratio < least + tiny && (best < 0 || s->basic[i] < s->basic[best]))) least = ratio, best = i;
    }
    return best;
}

/* Steepest column first; after many steps the first one that improves (Bland), which always ends. */
static int entering(const struct tableau *s, int n_col, int step) {
    int best = -1;
    for (int j = 0; j < n_col; j++) {
        if (s->t[s->m][j] >= -tiny) continue;
        if (best < 0 || s->t[s->m][j] < s->t[s->m][best]) best = j;
        if (step > DANTZIG_STEPS) break;
    }
    return best;
}

/* Only the first n_col columns may enter. */
static enum lp_result improve(struct tableau *s, int n_col) {
    for (int step = 0; step < MAX_STEPS; step++) {
        int col = entering(s, n_col, step);
        if (col < 0) return LP_SOLVED;
        int row = leaving(s, col);
        if (row < 0) return LP_FAILED;
        pivot(s, row, col);
    }
    return LP_FAILED;
}

/* Cost row = costs minus what the basic variables account for. */
static void price(struct tableau *s, const double *cost) {
    memcpy(s->t[s->m], cost, sizeof s->t[0]);
    for (int i = 0; i < s->m; i++) {
        double f = s->t[s->m][s->basic[i]];
        if (f == 0) continue;
        for (int j = 0; j <= s->n_col; j++) s->t[s->m][j] -= f * s->t[i][j];
    }
}

enum lp_result lp_solve(double x[LP_VARS], const struct lp *p) {
    struct tableau s = {.m = p->m, .n_col = p->n + 2 * p->m};
    double phase1[COLS] = {0}, phase2[COLS] = {0};
    int artificial = p->n + p->m; /* first column of them */
    for (int i = 0; i < p->m; i++) {
        double sign = p->b[i] < 0 ? -1 : 1, slack = p->sense[i] == LP_LE ? 1 : p->sense[i] == LP_GE ? -1 : 0;
        for (int j = 0; j < p->n; j++) s.t[i][j] = sign * p->a[i][j];
        s.t[i][p->n + i] = sign * slack;
        s.t[i][s.n_col] = sign * p->b[i];
        if (sign * slack > 0) {
            s.basic[i] = p->n + i;
        } else {
            s.t[i][artificial + i] = 1;
            s.basic[i] = artificial + i;
            phase1[artificial + i] = 1;
        }
    }
    price(&s, phase1);
    enum lp_result r = improve(&s, artificial);
    if (r != LP_SOLVED) return r;
    if (-s.t[s.m][s.n_col] > 1e-7) return LP_INFEASIBLE;
    for (int i = 0; i < s.m; i++) { /* artificial variables that stayed at zero leave, where anything else can take the row */
        for (int j = 0; j < artificial && s.basic[i] >= artificial; j++)
            if (fabs(s.t[i][j]) > 1e-7) pivot(&s, i, j);
    }
    memcpy(phase2, p->c, sizeof p->c[0] * (unsigned)p->n);
    price(&s, phase2);
    r = improve(&s, artificial);
    memset(x, 0, sizeof x[0] * LP_VARS);
    for (int i = 0; i < s.m; i++)
        if (s.basic[i] < p->n) x[s.basic[i]] = s.t[i][s.n_col] > 0 ? s.t[i][s.n_col] : 0;
    return r;
}
