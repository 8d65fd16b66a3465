# liger_rocm: every *_cuda.cu for AMD's GPUs. hipcc is called as it is: CMake's own HIP language does not find Debian's.
# The PyTorch that AMD's GPUs have calls them cuda, and so does the library. It compiles; nothing of it has run.
set(LIGER_ROCM_ARCHITECTURES gfx90a gfx1030 CACHE STRING "AMD's architectures, such as gfx90a;gfx1100")
set(LIGER_ROCM_FLAGS -O3 CACHE STRING "More flags for hipcc")
find_program(hipcc hipcc PATHS /opt/rocm/bin REQUIRED)
list(TRANSFORM LIGER_ROCM_ARCHITECTURES PREPEND --offload-arch= OUTPUT_VARIABLE offload)
liger_glob(kernels RELATIVE ${PROJECT_SOURCE_DIR} liger/core/*_cuda.cu liger/ops/*_cuda.cu)
list(FILTER kernels EXCLUDE REGEX grouped_gemm)  # wgmma, which AMD's GPUs do not have
set(objects)
foreach(kernel ${kernels})
  get_filename_component(stem ${kernel} NAME_WE)
  set(object ${PROJECT_BINARY_DIR}/rocm/${stem}.o)
  add_custom_command(
    OUTPUT ${object}
    COMMAND ${CMAKE_COMMAND} -E env HIP_PLATFORM=amd ${hipcc} -x hip -std=c++20 -fPIC ${LIGER_ROCM_FLAGS} ${offload} -I ${PROJECT_SOURCE_DIR}
            -Wno-unused-command-line-argument -MMD -MF ${object}.d -MT ${object} -c ${PROJECT_SOURCE_DIR}/${kernel} -o ${object}
    DEPENDS ${kernel} DEPFILE ${object}.d
    COMMENT "Compiling ${kernel} for ${LIGER_ROCM_ARCHITECTURES}"
    VERBATIM)
  list(APPEND objects ${object})
endforeach()
file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/rocm)
add_custom_target(liger_rocm DEPENDS ${objects})
add_dependencies(liger liger_rocm)
target_sources(liger PRIVATE ${objects})
set_source_files_properties(${objects} PROPERTIES EXTERNAL_OBJECT ON GENERATED ON)
find_library(amdhip64 amdhip64 PATHS /opt/rocm/lib REQUIRED)
target_link_libraries(liger PRIVATE ${amdhip64})
list(JOIN LIGER_ROCM_ARCHITECTURES ", " cuda_built)
set(cuda_built "${cuda_built} (hipcc)")
