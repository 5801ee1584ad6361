/* timeline_draw.c: a timeline as text and as SVG. */
#include "offload/timeline.h"

#include "core/err.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { COLUMNS = 96, WIDTH = 1200, LANE_HEIGHT = 46, LEFT = 60 };

static const char *const lane_names[LANE_COUNT] = {"GPU", "H2D", "CPU"};
static const char *const kind_names[TIMELINE_KINDS] = {"mixers", "attention", "FFN", "output", "KV copies"};
static const char letters[TIMELINE_KINDS] = {'m', 'a', 'f', 'o', 'k'};
static const char *const colours[TIMELINE_KINDS] = {"#4e79a7", "#e15759", "#59a14f", "#b07aa1", "#f28e2b"};

/* Each column shows what took most of its time. */
static void text_lane(const struct timeline *t, enum timeline_lane lane, char out[COLUMNS + 1]) {
    double share[COLUMNS][TIMELINE_KINDS];
    memset(share, 0, sizeof share);
    for (int i = 0; i < t->n_event; i++) {
        const struct timeline_event *e = &t->events[i];
        if (e->lane != lane) continue;
        double from = e->start_s > 0 ? e->start_s / t->step_s * COLUMNS : 0, to = e->end_s / t->step_s * COLUMNS;
        for (int c = (int)from; c < COLUMNS && c < to; c++) {
            double a = c > from ? c : from, b = c + 1 < to ? c + 1 : to;
            share[c][e->kind] += b > a ? b - a : 0;
        }
    }
    for (int c = 0; c < COLUMNS; c++) {
        double all = 0;
        int best = 0;
        for (int k = 0; k < TIMELINE_KINDS; k++) {
            all += share[c][k];
            if (share[c][k] > share[c][best]) best = k;
        }
        out[c] = all < 0.25 ? '.' : all < 0.75 ? letters[best] : (char)(letters[best] - 'a' + 'A');
    }
    out[COLUMNS] = 0;
}

void timeline_text(const struct timeline *t, FILE *to) {
    char lane[COLUMNS + 1];
    fprintf(to, "%s: %.2f ms predicted; each column %.3f ms (capitals: busy for most of it)\n", t->title, t->step_s * 1e3, t->step_s * 1e3 / COLUMNS);
    for (int l = 0; l < LANE_COUNT; l++) {
        text_lane(t, (enum timeline_lane)l, lane);
        fprintf(to, "  %s %s %3.0f %%\n", lane_names[l], lane, 100 * t->busy_s[l] / t->step_s);
    }
    fprintf(to, "  copies %.2f ms hidden, %.2f ms waited for\n", t->hidden_s * 1e3, t->exposed_s * 1e3);
    for (int k = 0; k < TIMELINE_KINDS; k++) {
        const struct timeline_use *u = &t->use[k];
        if (u->gpu_s + u->cpu_s + u->copy_s > 0)
            fprintf(to, "  %c %-10s GPU %8.2f ms  CPU %8.2f ms (%.2f beyond the GPU's part)  copies %8.2f ms, %.2f waited for\n", letters[k], kind_names[k],
                    u->gpu_s * 1e3, u->cpu_s * 1e3, u->cpu_exposed_s * 1e3, u->copy_s * 1e3, u->exposed_s * 1e3);
    }
}

static void svg_body(const struct timeline *t, FILE *f) {
    int height = 60 + LANE_COUNT * LANE_HEIGHT + 30;
    double scale = (WIDTH - LEFT - 10) / t->step_s;
    fprintf(f, "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" font-family=\"sans-serif\" font-size=\"12\">\n", WIDTH, height);
    fprintf(f, "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n<text x=\"%d\" y=\"18\">%s: %.2f ms predicted; copies %.2f ms hidden, %.2f ms "
               "waited for</text>\n", LEFT, t->title, t->step_s * 1e3, t->hidden_s * 1e3, t->exposed_s * 1e3);
    for (int k = 0; k < TIMELINE_KINDS; k++)
        fprintf(f, "<rect x=\"%d\" y=\"28\" width=\"10\" height=\"10\" fill=\"%s\"/><text x=\"%d\" y=\"37\">%s</text>\n", LEFT + 110 * k, colours[k],
                LEFT + 110 * k + 14, kind_names[k]);
    for (int l = 0; l < LANE_COUNT; l++) {
        int y = 50 + l * LANE_HEIGHT;
        fprintf(f, "<text x=\"8\" y=\"%d\">%s</text><line x1=\"%d\" x2=\"%d\" y1=\"%d\" y2=\"%d\" stroke=\"#ccc\"/>\n", y + 22, lane_names[l], LEFT, WIDTH - 10,
                y + LANE_HEIGHT - 6, y + LANE_HEIGHT - 6);
    }
    for (int i = 0; i < t->n_event; i++) {
        const struct timeline_event *e = &t->events[i];
        double from = e->start_s > 0 ? e->start_s : 0, to = e->end_s < t->step_s ? e->end_s : t->step_s;
        if (to <= from) continue;
        char layer[24] = "";
        if (e->il >= 0) snprintf(layer, sizeof layer, " of layer %d", e->il);
        fprintf(f, "<rect x=\"%.2f\" y=\"%d\" width=\"%.2f\" height=\"%d\" fill=\"%s\"><title>%s%s: %.3f ms, %.1f MB</title></rect>\n", LEFT + from * scale,
                50 + (int)e->lane * LANE_HEIGHT + 2, (to - from) * scale, LANE_HEIGHT - 10, colours[e->kind], kind_names[e->kind], layer,
                (e->end_s - e->start_s) * 1e3, e->bytes * 1e-6);
    }
    for (int i = 0; i <= 10; i++)
        fprintf(f, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%.1f ms</text>\n", LEFT + (WIDTH - LEFT - 10) * i / 10.0, height - 10,
                t->step_s * 1e2 * i);
    fprintf(f, "</svg>\n");
}

int timeline_svg(const struct timeline *t, const char *path) {
    char part[4096];
    if (snprintf(part, sizeof part, "%s.part", path) >= (int)sizeof part) return err_set(ERR_ARG, "%.100s...: the name is too long", path);
    FILE *f = fopen(part, "w");
    if (!f) return err_set(ERR_IO, "cannot write %s: %s", part, strerror(errno));
    svg_body(t, f);
    bool bad = ferror(f);
    if (fclose(f) || bad || rename(part, path)) {
        int why = errno;
        remove(part);
        return err_set(ERR_IO, "cannot write %s: %s", path, strerror(why));
    }
    return 0;
}
