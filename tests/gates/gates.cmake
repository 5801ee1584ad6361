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
# A build without CUDA: the same program must link and start with the real back end in the place of none.c.
if(TARGET longhaul_cli AND NOT LH_GPU_BUILT AND NOT LONGHAUL_SANITIZE)
  string(REPLACE ";" "\n" lh_gate_libraries "${PCRE2_LINK_LIBRARIES};${JANSSON_LINK_LIBRARIES};${HWLOC_LINK_LIBRARIES}")
  file(GENERATE OUTPUT ${PROJECT_BINARY_DIR}/gates/program.rsp CONTENT "$<JOIN:$<TARGET_OBJECTS:longhaul_cli>,\n>
$<TARGET_FILE:longhaul>\n$<TARGET_FILE:lh_cpu>\n$<TARGET_FILE:lh_core>\n${lh_gate_libraries}\n")
  lh_add_gate(program --cc ${CMAKE_C_COMPILER} --files @${PROJECT_BINARY_DIR}/gates/program.rsp)
endif()
