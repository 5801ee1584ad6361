/* test_clock.c: real time moves forward and ignores work; a source is asked instead, and can be taken away again. */
#include "core/clock.h"
#include "tests/support.h"

static double simulated_s;
static double now_s(void) { return simulated_s; }
static void work(double bytes, double flops) { simulated_s += bytes / 10 + flops / 1000; }

static void test_real(void **state) {
    (void)state;
    double a = clock_now_s();
    clock_work(1e18, 1e18);
    double b = clock_now_s();
    assert_true(b >= a && b - a < 60);
    assert_false(clock_simulated());
}

static void test_source(void **state) {
    (void)state;
    clock_use(&(struct clock_source){now_s, work});
    assert_true(clock_simulated());
    assert_true(clock_now_s() == 0);
    clock_work(20, 3000);
    assert_true(clock_now_s() == 5);
    clock_use(NULL);
    assert_false(clock_simulated());
    assert_true(clock_now_s() != 5);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_real), cmocka_unit_test(test_source)};
    return cmocka_run_group_tests_name("clock", tests, NULL, NULL);
}
