# One executable for each tests/native/*.cpp, with the flags of the host library. They link an archive of its objects,
# so a test may also include a .cu itself: what it then defines is not taken from the archive. With EP_A2A_HOSTILE there
# is one executable, hostile.cpp, which brings the scheduler and the memory that all objects then refer to.

file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/native/*.cpp")
if(EP_A2A_HOSTILE)
  list(FILTER sources INCLUDE REGEX "/hostile\\.cpp$")
else()
  list(FILTER sources EXCLUDE REGEX "/hostile\\.cpp$")
endif()
add_library(ep_a2a_archive STATIC EXCLUDE_FROM_ALL $<TARGET_OBJECTS:ep_a2a_objects>)
set_target_properties(ep_a2a_archive PROPERTIES LINKER_LANGUAGE CXX)
target_link_libraries(ep_a2a_archive PUBLIC ep_a2a_flags)
add_custom_target(native_tests)
foreach(source IN LISTS sources)
  cmake_path(GET source STEM name)
  add_executable(${name} EXCLUDE_FROM_ALL "${source}")
  target_link_libraries(${name} PRIVATE ep_a2a_archive)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${EP_A2A_BIN_DIR}")
  add_dependencies(native_tests ${name})
endforeach()

# litmus.cu needs a GPU to run: target `litmus`, with the flags of the CUDA library
if(EP_A2A_CUDA AND NOT EP_A2A_HOSTILE)
  add_executable(litmus EXCLUDE_FROM_ALL "${PROJECT_SOURCE_DIR}/tests/native/litmus.cu")
  target_include_directories(litmus PRIVATE "${PROJECT_SOURCE_DIR}/cuda")
  target_compile_options(litmus PRIVATE ${EP_A2A_CUDA_FLAGS})
  set_target_properties(litmus PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${EP_A2A_BIN_DIR}" CUDA_RUNTIME_LIBRARY Static)
  add_dependencies(native_tests litmus)
endif()
