# liger_cuda: every *_cuda.cu, for LIGER_CUDA_ARCHITECTURES. It is a part of the library; liger_kernels is the same as a library of its own, for
# LIGER_KERNELS of other builds.
if(CMAKE_VERSION VERSION_LESS 3.30)  # older ones do not know the C++20 of nvcc 13
  message(FATAL_ERROR "liger: CUDA kernels need CMake 3.30 or newer, and this is ${CMAKE_VERSION}. Install a newer one (pip install cmake), or build without them: \
-DLIGER_CUDA=OFF.")
endif()
set(LIGER_CUDA_ARCHITECTURES "" CACHE STRING
    "CUDA architectures, such as 80;90a, as they are; native: the GPU that is there; empty: that GPU, else 80;90a, and PTX for newer ones")
set(architectures ${LIGER_CUDA_ARCHITECTURES})
set(ptx "")
if(NOT architectures OR architectures STREQUAL "native")
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
                  OUTPUT_VARIABLE capabilities OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE no_gpu)
  if(NOT no_gpu AND capabilities MATCHES "[0-9]")
    string(REGEX MATCHALL "[0-9]+\\.[0-9]+" architectures "${capabilities}")
    list(REMOVE_DUPLICATES architectures)
    list(TRANSFORM architectures REPLACE "\\." "")
    list(TRANSFORM architectures REPLACE "^90$" "90a")
  else()
    set(architectures 80 90a)
  endif()
  if(NOT LIGER_CUDA_ARCHITECTURES)
    list(SORT architectures COMPARE NATURAL)
    list(GET architectures -1 newest)
    string(REGEX MATCH "^[0-9]+" ptx ${newest})  # 90a's PTX runs on no other GPU; plain 90's does
  endif()
endif()
list(TRANSFORM architectures APPEND "-real" OUTPUT_VARIABLE CMAKE_CUDA_ARCHITECTURES)
list(JOIN architectures ", " cuda_built)
if(ptx)
  list(APPEND CMAKE_CUDA_ARCHITECTURES ${ptx}-virtual)
  string(APPEND cuda_built ", PTX of ${ptx}")
endif()

set(CMAKE_CUDA_COMPILER ${nvcc})
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
liger_glob(cuda_kernels liger/core/*_cuda.cu liger/ops/*_cuda.cu)
list(SORT cuda_kernels ORDER DESCENDING)  # the norms, which take the longest, are not what a build waits for at its end
add_library(liger_cuda OBJECT EXCLUDE_FROM_ALL ${cuda_kernels})
target_include_directories(liger_cuda PRIVATE ${PROJECT_SOURCE_DIR})
target_compile_features(liger_cuda PRIVATE cuda_std_20)
# The environment's options are for one configuration and are not cached: what tests/run.sh compiles for its errors alone, a later build compiles again.
target_compile_options(liger_cuda PRIVATE --expt-relaxed-constexpr --extended-lambda -Xcudafe=--diag_suppress=177 $ENV{LIGER_CUDA_OPTIONS})
if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.1)
  # The one that a build waits for, on all cores (measured on 16 of them: 94 -> 64 s).
  set_source_files_properties(liger/ops/norm/norm_backward_cuda.cu PROPERTIES COMPILE_OPTIONS --split-compile=0)
endif()
add_library(liger_kernels SHARED EXCLUDE_FROM_ALL liger/core/kernel.cpp)
target_include_directories(liger_kernels PRIVATE ${PROJECT_SOURCE_DIR})
target_link_libraries(liger_kernels PRIVATE liger_cuda CUDA::cudart_static)
target_link_options(liger_kernels PRIVATE -Wl,--exclude-libs,ALL)  # as of liger_ops
if(LIGER_KERNELS)
  target_link_libraries(liger PRIVATE ${LIGER_KERNELS})
else()
  target_link_libraries(liger PRIVATE liger_cuda CUDA::cudart_static)
endif()
set_target_properties(liger PROPERTIES CUDA_ARCHITECTURES "${CMAKE_CUDA_ARCHITECTURES}")  # it was declared before they were known
set(cuda_built "sm ${cuda_built} (nvcc ${CMAKE_CUDA_COMPILER_VERSION})")
