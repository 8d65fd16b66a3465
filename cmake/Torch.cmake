# liger_torch: the headers and libraries of the torch in Python_EXECUTABLE's environment.
find_package(Python REQUIRED COMPONENTS Interpreter)
execute_process(
  COMMAND ${Python_EXECUTABLE} -c "import os, torch; print(os.path.dirname(torch.__file__), torch.__version__.split('+')[0], sep=';')"
  OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed)
if(failed)
  message(FATAL_ERROR "liger: ${Python_EXECUTABLE} cannot import torch. Install torch >= 2.11 first and build with --no-build-isolation, or pass -DPython_EXECUTABLE.")
endif()
list(GET found 0 torch)
list(GET found 1 LIGER_TORCH_VERSION)
if(LIGER_TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "liger: needs torch >= 2.11, found ${LIGER_TORCH_VERSION}")
endif()
set(torch_libraries torch torch_cpu c10)
add_library(liger_torch INTERFACE)
target_include_directories(liger_torch SYSTEM INTERFACE
  $<BUILD_INTERFACE:${torch}/include> $<BUILD_INTERFACE:${torch}/include/torch/csrc/api/include>)
foreach(name ${torch_libraries})
  target_link_libraries(liger_torch INTERFACE $<BUILD_INTERFACE:${torch}/lib/${CMAKE_SHARED_LIBRARY_PREFIX}${name}${CMAKE_SHARED_LIBRARY_SUFFIX}>)
endforeach()
