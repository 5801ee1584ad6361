# The compile gates (gates.py) as tests; included by the top CMakeLists.txt inside the tests block. Where a toolkit is missing
# they are skipped and say so. They use all cores and share one folder of objects: label slow, one at a time.
find_package(Python3 COMPONENTS Interpreter REQUIRED)
set(LONGHAUL_GATE_ARCHS ci CACHE STRING "Chips of the compile gate: ci (75, 80, 90, 120), full, or a list like 75,86")
function(lh_add_gate mode)
  lh_add_test(gate_${mode} ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/tests/gates/gates.py ${mode} ${PROJECT_SOURCE_DIR}
              ${PROJECT_BINARY_DIR}/gates ${ARGN})
  set_tests_properties(gate_${mode} PROPERTIES LABELS slow RESOURCE_LOCK lh_gates TIMEOUT 1800)
endfunction()
lh_add_gate(host --cc ${CMAKE_C_COMPILER})
lh_add_gate(kernels --archs ${LONGHAUL_GATE_ARCHS})
lh_add_gate(sm70)
