/* allow.c: memory and CPU limits from /proc and control groups. See allow.h. */
#include "offload/allow.h"

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Where one controller is mounted and which group of it this process is in. */
struct group {
    char mount[PATH_MAX]; /* directory of the mount's root group */
    char path[PATH_MAX];  /* below mount: "" or "/a/b" */
    bool v2;
};

static bool join(char *out, const char *a, const char *b) {
    return snprintf(out, PATH_MAX, "%s%s", a, b) < PATH_MAX;
}

static FILE *open_at(const char *dir, const char *name) {
    char path[PATH_MAX];
    return join(path, dir, name) ? fopen(path, "re") : NULL;
}

/* The first line of dir/name without its newline. false: no such file. */
static bool read_line(char *out, int n, const char *dir, const char *name) {
    FILE *f = open_at(dir, name);
    if (!f) return false;
    bool ok = fgets(out, n, f);
    fclose(f);
    if (ok) out[strcspn(out, "\n")] = 0;
    return ok;
}

/* Number in dir/name. "max", negative and missing values are not numbers: false, they do not limit. */
static bool read_bytes(uint64_t *out, const char *dir, const char *name) {
    char text[64], *end;
    if (!read_line(text, sizeof text, dir, name) || text[0] < '0' || text[0] > '9') return false;
    *out = strtoull(text, &end, 10);
    return end != text;
}

/* Value of the line "KEY VALUE" or "KEY: VALUE kB" of dir/name; 0 when absent. */
static uint64_t read_key(const char *dir, const char *name, const char *key) {
    FILE *f = open_at(dir, name);
    char line[256];
    uint64_t value = 0;
    size_t n = strlen(key);
    while (f && fgets(line, sizeof line, f)) {
        if (strncmp(line, key, n) || (line[n] != ' ' && line[n] != ':')) continue;
        value = strtoull(line + n + 1, NULL, 10);
        break;
    }
    if (f) fclose(f);
    return value;
}

static bool has_word(const char *list, const char *word) { /* comma-separated */
    size_t n = strlen(word);
    for (const char *p = list; (p = strstr(p, word)); p += n)
        if ((p == list || p[-1] == ',') && (p[n] == ',' || p[n] == 0)) return true;
    return false;
}

/* mountinfo writes blanks and backslashes in paths as \ooo. */
static void unescape(char *s) {
    char *to = s;
    for (; *s; s++, to++) {
        bool octal = s[0] == '\\' && s[1] >= '0' && s[1] <= '3' && s[2] >= '0' && s[2] <= '7' && s[3] >= '0' && s[3] <= '7';
        *to = octal ? (char)((s[1] - '0') * 64 + (s[2] - '0') * 8 + (s[3] - '0')) : *s;
        if (octal) s += 3;
    }
    *to = 0;
}

/* Splits a line of mountinfo: "36 35 98:0 ROOT POINT options [tags] - TYPE source SUPER". */
static bool mount_fields(char *line, char **root, char **point, char **type, char **super) {
    char *save, *dash = strstr(line, " - ");
    if (!dash) return false;
    *dash = 0;
    strtok_r(line, " ", &save);
    strtok_r(NULL, " ", &save);
    strtok_r(NULL, " ", &save);
    *root = strtok_r(NULL, " ", &save);
    *point = strtok_r(NULL, " ", &save);
    *type = strtok_r(dash + 3, " \n", &save);
    strtok_r(NULL, " \n", &save);
    *super = strtok_r(NULL, " \n", &save);
    if (!*root || !*point || !*type || !*super) return false;
    unescape(*root);
    unescape(*point);
    return true;
}

/* Finds the mount of a v1 controller, or of the v2 hierarchy. root: the group that the mount shows as its top (in a
 * container often not "/"). Without mountinfo: the usual place. */
static void find_mount(struct group *g, char *root, const char *controller, const char *proc, const char *cgroup_root) {
    static const char usual[] = "/sys/fs/cgroup";
    const size_t n_usual = sizeof usual - 1;
    snprintf(root, PATH_MAX, "/");
    if (g->v2)
        snprintf(g->mount, PATH_MAX, "%s", cgroup_root);
    else
        snprintf(g->mount, PATH_MAX, "%s/%s", cgroup_root, controller);
    FILE *f = open_at(proc, "/self/mountinfo");
    char *line = NULL;
    size_t cap = 0;
    while (f && getline(&line, &cap, f) > 0) {
        char *r, *point, *type, *super;
        if (!mount_fields(line, &r, &point, &type, &super)) continue;
        if (strcmp(type, g->v2 ? "cgroup2" : "cgroup") || (!g->v2 && !has_word(super, controller))) continue;
        bool moved = !strncmp(point, usual, n_usual) && (point[n_usual] == '/' || !point[n_usual]);
        if (!join(g->mount, moved ? cgroup_root : "", moved ? point + n_usual : point)) continue;
        snprintf(root, PATH_MAX, "%s", r);
        break;
    }
    free(line);
    if (f) fclose(f);
}

/* Fills g for `controller` ("memory", "cpu") of the wanted version from /proc/self/cgroup. false: not used here. */
static bool find_group(struct group *g, bool v2, const char *controller, const char *proc, const char *cgroup_root) {
    FILE *f = open_at(proc, "/self/cgroup");
    char *line = NULL, root[PATH_MAX];
    size_t cap = 0;
    bool found = false;
    while (f && !found && getline(&line, &cap, f) > 0) {
        line[strcspn(line, "\n")] = 0;
        char *list = strchr(line, ':');
        char *path = list ? strchr(++list, ':') : NULL;
        if (!path) continue;
        *path++ = 0;
        if (v2 ? *list != 0 : !has_word(list, controller)) continue;
        g->v2 = v2;
        find_mount(g, root, controller, proc, cgroup_root);
        size_t n = strlen(root);
        if (n > 1 && !strncmp(path, root, n) && (path[n] == '/' || !path[n])) path += n;
        /* "/..": the process lives outside the group namespace that we see. Its top is then all there is to read. */
        bool outside = strstr(path, "/..") || !strcmp(path, "/");
        found = join(g->path, outside ? "" : path, "");
    }
    free(line);
    if (f) fclose(f);
    return found;
}

/* The group's share of memory that is left, SIZE_MAX when unlimited. limit: for the explanation. */
static uint64_t memory_left(const char *dir, bool v2, uint64_t *limit) {
    uint64_t high, used = 0;
    *limit = UINT64_MAX;
    read_bytes(limit, dir, v2 ? "/memory.max" : "/memory.limit_in_bytes");
    if (v2 && read_bytes(&high, dir, "/memory.high") && high < *limit) *limit = high; /* above it: throttled to a crawl */
    if (*limit == UINT64_MAX || !read_bytes(&used, dir, v2 ? "/memory.current" : "/memory.usage_in_bytes")) return *limit;
    uint64_t cache = read_key(dir, "/memory.stat", v2 ? "inactive_file" : "total_inactive_file") +
                     read_key(dir, "/memory.stat", v2 ? "active_file" : "total_active_file");
    used -= cache < used ? cache : used;
    return used < *limit ? *limit - used : 0;
}

/* CPUs' worth of quota of one group, 0 when unlimited. */
static double cpu_share(const char *dir, bool v2) {
    char text[64];
    long long quota = 0, period = 0;
    if (v2) {
        if (!read_line(text, sizeof text, dir, "/cpu.max") || sscanf(text, "%lld %lld", &quota, &period) != 2) return 0;
    } else {
        if (!read_line(text, sizeof text, dir, "/cpu.cfs_quota_us") || sscanf(text, "%lld", &quota) != 1) return 0;
        if (!read_line(text, sizeof text, dir, "/cpu.cfs_period_us") || sscanf(text, "%lld", &period) != 1) return 0;
    }
    return quota > 0 && period > 0 ? (double)quota / (double)period : 0;
}

static void apply_memory(struct allowance *out, const struct group *g, const char *dir) {
    uint64_t limit, left = memory_left(dir, g->v2, &limit);
    if (left >= out->available_bytes) return;
    out->available_bytes = (size_t)left;
    snprintf(out->available_why, sizeof out->available_why, "memory limit of control group %.200s (%llu bytes)",
             g->path[0] ? g->path : "/", (unsigned long long)limit);
}

static void apply_cpu(struct allowance *out, const struct group *g, const char *dir) {
    double share = cpu_share(dir, g->v2);
    if (share > 0 && (out->cpu_quota == 0 || share < out->cpu_quota)) out->cpu_quota = share;
}

/* Calls apply for the process's group and every ancestor up to the mount's root. Shortens g->path on the way. */
static void walk_up(struct allowance *out, struct group *g,
                    void (*apply)(struct allowance *, const struct group *, const char *dir)) {
    for (;;) {
        char dir[PATH_MAX];
        if (join(dir, g->mount, g->path)) apply(out, g, dir);
        char *slash = strrchr(g->path, '/');
        if (!slash) return;
        *slash = 0;
    }
}

static void read_memory(struct allowance *out, const char *proc) {
    uint64_t total = read_key(proc, "/meminfo", "MemTotal") << 10;
    uint64_t available = read_key(proc, "/meminfo", "MemAvailable") << 10;
    if (!available) /* kernels before 3.14 */
        available = (read_key(proc, "/meminfo", "MemFree") + read_key(proc, "/meminfo", "Cached")) << 10;
    long page = sysconf(_SC_PAGESIZE);
    if (!total) total = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)page;
    if (!available) available = (uint64_t)sysconf(_SC_AVPHYS_PAGES) * (uint64_t)page;
    out->total_bytes = (size_t)total;
    out->available_bytes = (size_t)available;
    snprintf(out->available_why, sizeof out->available_why, "MemAvailable");
}

static void read_model(struct allowance *out, const char *proc) {
    FILE *f = open_at(proc, "/cpuinfo");
    char line[256];
    snprintf(out->cpu_model, sizeof out->cpu_model, "unknown CPU");
    while (f && fgets(line, sizeof line, f)) {
        char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) || !colon) continue;
        line[strcspn(line, "\n")] = 0;
        colon += 1 + strspn(colon + 1, " \t");
        if (*colon) snprintf(out->cpu_model, sizeof out->cpu_model, "%.*s", (int)sizeof out->cpu_model - 1, colon);
        break;
    }
    if (f) fclose(f);
}

void allow_read(struct allowance *out, const char *proc_root, const char *cgroup_root) {
    *out = (struct allowance){0};
    read_memory(out, proc_root);
    read_model(out, proc_root);
    for (int v2 = 0; v2 < 2; v2++) { /* hybrid systems use both at once, for different controllers */
        struct group g = {0};
        if (find_group(&g, v2, "memory", proc_root, cgroup_root)) walk_up(out, &g, apply_memory);
        if (find_group(&g, v2, "cpu", proc_root, cgroup_root)) walk_up(out, &g, apply_cpu);
    }
}
