# The host library. A source file's LANGUAGE is one property for all targets, so the .cu files themselves stay CUDA's
# and the host compiles stubs that include them. The .cpp files beside them are the host's alone.

set(stubs "")
foreach(kernel IN LISTS EP_A2A_KERNELS)
  cmake_path(GET kernel STEM name)
  set(stub "${PROJECT_BINARY_DIR}/host/${name}.cpp")
  file(CONFIGURE OUTPUT "${stub}" CONTENT "#include \"${kernel}\"\n" @ONLY)
  list(APPEND stubs "${stub}")
endforeach()

file(GLOB host_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/cuda/*.cpp")
add_library(ep_a2a_objects OBJECT ${stubs} ${host_sources})
target_link_libraries(ep_a2a_objects PUBLIC ep_a2a_flags)

add_library(ep_a2a_host SHARED $<TARGET_OBJECTS:ep_a2a_objects>)
target_link_libraries(ep_a2a_host PRIVATE ep_a2a_flags)
set_target_properties(ep_a2a_host PROPERTIES LINKER_LANGUAGE CXX LIBRARY_OUTPUT_DIRECTORY "${EP_A2A_LIB_DIR}")
install(TARGETS ep_a2a_host LIBRARY DESTINATION ep_a2a/lib)
