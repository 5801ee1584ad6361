/* test_topo.c: topologies of machines that we do not own, memory and CPU limits of made-up control groups. */
#include "offload/allow.h"
#include "offload/topo.h"
#include "tests/support.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define MACHINES TEST_DATA "/../machines/"
#define MIB ((size_t)1 << 20)

/* --- topologies ------------------------------------------------------------------------------------------------------- */

static struct topo *open_machine(const char *file) {
    struct topo *t = NULL;
    setenv("HWLOC_XMLFILE", file, 1);
    assert_int_equal(topo_open(&t), 0);
    unsetenv("HWLOC_XMLFILE");
    t->cpu_quota = 0; /* a quota on the testing machine must not change what the described one gives */
    return t;
}

static void assert_picks(const struct topo *t, int n, const int *want, int n_want) {
    int got[64] = {0};
    assert_int_equal(topo_pick_cores(t, n, got), n_want);
    for (int i = 0; i < n_want; i++)
        if (got[i] != want[i]) fail_msg("worker %d of %d: got CPU %d, want %d", i, n, got[i], want[i]);
}

static void hybrid_without_smt_uses_its_fast_cores(void **s) {
    (void)s;
    struct topo *t = open_machine(MACHINES "hybrid-8p-12e.xml");
    assert_int_equal(t->n_cpu, 20);
    assert_int_equal(t->n_core, 20);
    assert_int_equal(topo_default_threads(t), 8);
    assert_picks(t, 10, (int[]){12, 13, 14, 15, 16, 17, 18, 19, 0, 1}, 10);
    assert_int_equal(t->l2_bytes, 3 * MIB);
    assert_int_equal(t->l3_bytes, 36 * MIB);
    assert_false(t->this_machine);
    topo_close(t);
}

static void siblings_come_last(void **s) {
    (void)s;
    struct topo *t = open_machine(MACHINES "two-sockets-smt.xml");
    assert_int_equal(t->n_cpu, 16);
    assert_int_equal(t->n_core, 8);
    assert_int_equal(t->n_package, 2);
    assert_int_equal(t->n_node, 2);
    assert_int_equal(topo_default_threads(t), 8);
    assert_picks(t, 4, (int[]){0, 1, 2, 3}, 4);
    assert_picks(t, 99, (int[]){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, 16);
    for (int i = 0; i < t->n_cpu; i++) {
        const struct topo_cpu *c = &t->cpus[i];
        assert_int_equal(c->sibling, c->id / 8);
        assert_int_equal(c->core, c->id % 8);
        assert_int_equal(c->node, c->id % 8 / 4);
        assert_int_equal(c->package, c->node);
    }
    topo_close(t);
}

static void quota_limits_threads(void **s) {
    (void)s;
    struct topo *t = open_machine(MACHINES "two-sockets-smt.xml");
    const struct { double quota; int threads; } rows[] = {{0, 8}, {0.1, 1}, {1, 1}, {1.01, 2}, {7.5, 8}, {64, 8}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        t->cpu_quota = rows[i].quota;
        int got = topo_default_threads(t);
        if (got != rows[i].threads) fail_msg("quota %g: got %d threads, want %d", rows[i].quota, got, rows[i].threads);
    }
    topo_close(t);
}

static void memory_only_node_gets_no_threads_and_nodeless_cores_work(void **s) {
    (void)s;
    struct topo *t = open_machine(MACHINES "odd-nodes.xml");
    assert_int_equal(t->n_cpu, 4);
    assert_int_equal(topo_default_threads(t), 4);
    assert_int_equal(t->n_node, 2);
    for (int i = 0; i < 2; i++) assert_int_equal(t->nodes[i].n_cpu, t->nodes[i].id == 0 ? 2 : 0);
    for (int i = 0; i < 4; i++) assert_int_equal(t->cpus[i].node, t->cpus[i].id < 2 ? 0 : -1);
    topo_close(t);
}

static void cpu_listed_twice_is_used_once(void **s) {
    (void)s;
    struct topo *t = open_machine(MACHINES "conflicting.xml");
    assert_picks(t, 9, (int[]){0, 1, 2}, 3);
    assert_int_equal(topo_default_threads(t), 3);
    topo_close(t);
}

/* What every machine must give, whatever was wrong with its description. */
static void assert_usable(const struct topo *t) {
    int cpu[4096];
    cpu_set_t mask;
    assert_in_range(t->n_cpu, 1, 4096);
    assert_in_range(topo_default_threads(t), 1, t->n_core);
    assert_int_equal(topo_pick_cores(t, 4096, cpu), t->n_cpu);
    assert_int_equal(sched_getaffinity(0, sizeof mask, &mask), 0);
    for (int i = 0; i < t->n_cpu; i++) assert_true(CPU_ISSET(cpu[i], &mask));
    assert_true(t->n_node >= 1 && t->n_package >= 1);
    assert_true(t->this_machine);
}

static void bad_descriptions_degrade(void **s) {
    (void)s;
    const char *files[] = {MACHINES "garbage.xml", MACHINES "empty.xml", MACHINES "no-such-file.xml"};
    for (int strict = 0; strict < 2; strict++) { /* strict: hwloc has nothing to fall back to, the layout is ours */
        if (strict) setenv("HWLOC_COMPONENTS", "xml,stop", 1);
        for (size_t i = 0; i < 3; i++) {
            struct topo *t = open_machine(files[i]);
            assert_usable(t);
            /* Without strict, hwloc falls back to the real machine or gives up, which depends on its XML parser. */
            if (strict) assert_true(t->note[0]);
            if (t->note[0]) assert_int_equal(t->n_core, t->n_cpu);
            topo_close(t);
        }
    }
    unsetenv("HWLOC_COMPONENTS");
}

/* Whatever this machine is: a process bound to one CPU sees that one. In a child, because affinity stays. */
static void only_allowed_cpus_are_used(void **s) {
    (void)s;
    cpu_set_t all, one;
    assert_int_equal(sched_getaffinity(0, sizeof all, &all), 0);
    for (int cpu = 0, tried = 0; cpu < CPU_SETSIZE && tried < 4; cpu++) {
        if (!CPU_ISSET(cpu, &all)) continue;
        tried++;
        pid_t child = fork();
        if (!child) {
            struct topo *t = NULL;
            int got = -1;
            CPU_ZERO(&one);
            CPU_SET(cpu, &one);
            int bad = sched_setaffinity(0, sizeof one, &one) || topo_open(&t) || topo_pick_cores(t, 1, &got) != 1 ||
                      got != cpu || t->n_cpu != 1 || topo_default_threads(t) != 1;
            topo_close(t);
            _exit(bad);
        }
        int status = -1;
        assert_int_equal(waitpid(child, &status, 0), child);
        if (status) fail_msg("bound to CPU %d: child ended with status %#x", cpu, (unsigned)status);
    }
}

static void this_machine_is_sound(void **s) {
    (void)s;
    struct topo *t = NULL;
    assert_int_equal(topo_open(&t), 0);
    assert_usable(t);
    assert_true(t->host_total_bytes > 64 * MIB);
    assert_in_range(t->host_available_bytes, 1, t->host_total_bytes);
    assert_true(t->cpu_model[0]);
    topo_close(t);
    topo_close(NULL);
}

/* --- limits ----------------------------------------------------------------------------------------------------------- */

static char root[64], proc[80], cgroup[80];

/* Writes a file below the temporary root, with its folders. */
static void put(const char *name, const char *text) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", root, name);
    for (char *p = path + strlen(root) + 1; (p = strchr(p, '/')); p++) {
        *p = 0;
        assert_true(!mkdir(path, 0700) || errno == EEXIST);
        *p = '/';
    }
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    assert_int_equal(fclose(f), 0);
}

static int new_tree(void **s) {
    (void)s;
    snprintf(root, sizeof root, "/tmp/longhaul-topo-XXXXXX");
    if (!mkdtemp(root)) return -1;
    snprintf(proc, sizeof proc, "%s/proc", root);
    snprintf(cgroup, sizeof cgroup, "%s/cgroup", root);
    put("proc/meminfo", "MemTotal:       16777216 kB\nMemFree:         1000000 kB\nMemAvailable:    8388608 kB\n");
    put("proc/cpuinfo", "processor\t: 0\nvendor_id\t: Some\nmodel name\t: Example 9000 @ 3 GHz\n\nprocessor\t: 1\n");
    return 0;
}

static int drop_tree(void **s) {
    (void)s;
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", root);
    return system(command);
}

static struct allowance read_tree(void) {
    struct allowance a;
    allow_read(&a, proc, cgroup);
    return a;
}

static void without_groups_memory_is_memavailable(void **s) {
    (void)s;
    struct allowance a = read_tree();
    assert_int_equal(a.total_bytes, 16384 * MIB);
    assert_int_equal(a.available_bytes, 8192 * MIB);
    assert_string_equal(a.available_why, "MemAvailable");
    assert_true(a.cpu_quota == 0);
    assert_string_equal(a.cpu_model, "Example 9000 @ 3 GHz");
}

static void v2_parent_limits_its_children(void **s) {
    (void)s;
    put("proc/self/cgroup", "0::/box/job\n");
    put("cgroup/memory.current", "1\n"); /* the real root has no memory.max */
    put("cgroup/box/memory.max", "2147483648\n");
    put("cgroup/box/memory.current", "1610612736\n");
    put("cgroup/box/memory.stat", "anon 1\ninactive_file 536870912\nactive_file 268435456\n");
    put("cgroup/box/cpu.max", "150000 100000\n");
    put("cgroup/box/job/memory.max", "max\n");
    put("cgroup/box/job/memory.current", "1073741824\n");
    put("cgroup/box/job/cpu.max", "max 100000\n");
    struct allowance a = read_tree();
    assert_int_equal(a.available_bytes, (2048 - 1536 + 768) * MIB); /* file cache is given back */
    assert_non_null(strstr(a.available_why, "/box (2147483648 bytes)"));
    assert_true(a.cpu_quota == 1.5);

    put("cgroup/box/job/memory.high", "1342177280\n"); /* throttled from 1280 MiB on, 1024 used */
    put("cgroup/box/job/cpu.max", "50000 100000\n");
    a = read_tree();
    assert_int_equal(a.available_bytes, 256 * MIB);
    assert_non_null(strstr(a.available_why, "/box/job (1342177280 bytes)"));
    assert_true(a.cpu_quota == 0.5);

    put("cgroup/box/memory.current", "3221225472\n"); /* above its limit: nothing is left, not a huge number */
    assert_int_equal(read_tree().available_bytes, 0);
}

static void v1_parent_limits_its_children(void **s) {
    (void)s;
    put("proc/self/cgroup", "9:name=systemd:/\n4:memory:/a/b\n3:cpu,cpuacct:/q\n0::/\n");
    put("proc/self/mountinfo", "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
                               "33 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
                               "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n");
    put("cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    put("cgroup/memory/memory.usage_in_bytes", "4294967296\n");
    put("cgroup/memory/a/memory.limit_in_bytes", "3221225472\n");
    put("cgroup/memory/a/memory.usage_in_bytes", "1073741824\n");
    put("cgroup/memory/a/memory.stat", "inactive_file 1\ntotal_inactive_file 104857600\ntotal_active_file 0\n");
    put("cgroup/memory/a/b/memory.limit_in_bytes", "9223372036854771712\n");
    put("cgroup/cpu,cpuacct/q/cpu.cfs_quota_us", "250000\n");
    put("cgroup/cpu,cpuacct/q/cpu.cfs_period_us", "100000\n");
    put("cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
    put("cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
    struct allowance a = read_tree();
    assert_int_equal(a.available_bytes, (3072 - 1024 + 100) * MIB);
    assert_true(a.cpu_quota == 2.5);
}

/* A container without a group namespace: paths are the host's, the mount shows the container's group as its top. */
static void container_mount_is_entered_at_its_root(void **s) {
    (void)s;
    put("proc/self/cgroup", "4:memory:/docker/abc/sub\n");
    put("proc/self/mountinfo", "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n");
    put("cgroup/memory/memory.limit_in_bytes", "4294967296\n");
    put("cgroup/memory/memory.usage_in_bytes", "0\n");
    put("cgroup/memory/sub/memory.limit_in_bytes", "1073741824\n");
    put("cgroup/memory/sub/memory.usage_in_bytes", "0\n");
    struct allowance a = read_tree();
    assert_int_equal(a.available_bytes, 1024 * MIB);
    put("proc/self/cgroup", "4:memory:/elsewhere\n");
    assert_int_equal(read_tree().available_bytes, 4096 * MIB);
    put("proc/self/cgroup", "4:memory:/../..\n");
    assert_int_equal(read_tree().available_bytes, 4096 * MIB);
}

static void unreadable_values_do_not_limit(void **s) {
    (void)s;
    const char *bad[] = {"", "\n", "lots\n", "-5\n", " 77\n"};
    put("proc/self/cgroup", "0::/x\n:\n::\n7\n\n");
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        put("cgroup/x/memory.max", bad[i]);
        put("cgroup/x/cpu.max", bad[i]);
        struct allowance a = read_tree();
        assert_int_equal(a.available_bytes, 8192 * MIB);
        assert_true(a.cpu_quota == 0);
    }
    struct allowance a;
    allow_read(&a, "/no/such/proc", "/no/such/cgroup");
    assert_true(a.total_bytes > 0 && a.available_bytes > 0 && a.cpu_quota == 0);
    assert_string_equal(a.cpu_model, "unknown CPU");
}

static void topology_carries_the_limits(void **s) {
    (void)s;
    struct topo *t = NULL;
    put("proc/self/cgroup", "0::/x\n");
    put("cgroup/x/memory.max", "1073741824\n");
    put("cgroup/x/cpu.max", "1 100000\n");
    assert_int_equal(topo_open_at(&t, proc, cgroup), 0);
    assert_int_equal(t->host_available_bytes, 1024 * MIB);
    assert_int_equal(topo_default_threads(t), 1);
    topo_close(t);
}

#define WITH_TREE(f) cmocka_unit_test_setup_teardown(f, new_tree, drop_tree)

int main(void) {
    /* The caller's own wishes must not leak into the cases. */
    const char *env[] = {"HWLOC_XMLFILE", "HWLOC_SYNTHETIC", "HWLOC_COMPONENTS", "HWLOC_THISSYSTEM", "HWLOC_FSROOT"};
    for (size_t i = 0; i < sizeof env / sizeof *env; i++) unsetenv(env[i]);
    const struct CMUnitTest t[] = {
        cmocka_unit_test(hybrid_without_smt_uses_its_fast_cores),
        cmocka_unit_test(siblings_come_last),
        cmocka_unit_test(quota_limits_threads),
        cmocka_unit_test(memory_only_node_gets_no_threads_and_nodeless_cores_work),
        cmocka_unit_test(cpu_listed_twice_is_used_once),
        cmocka_unit_test(bad_descriptions_degrade),
        cmocka_unit_test(only_allowed_cpus_are_used),
        cmocka_unit_test(this_machine_is_sound),
        WITH_TREE(without_groups_memory_is_memavailable),
        WITH_TREE(v2_parent_limits_its_children),
        WITH_TREE(v1_parent_limits_its_children),
        WITH_TREE(container_mount_is_entered_at_its_root),
        WITH_TREE(unreadable_values_do_not_limit),
        WITH_TREE(topology_carries_the_limits),
    };
    return cmocka_run_group_tests(t, NULL, NULL);
}
