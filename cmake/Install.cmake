# `cmake --install` and the wheel lay out the same tree: lib/, include/ and lib/cmake/liger/ under one prefix, which in a wheel is the
# package's folder (liger_kernel.cmake_prefix_path). What is compiled for one minor version of torch is in folders of that version
# (a wheel's libraries, every package's targets), so that the trees of several merge into one (cmake/wheels.py).
set(libraries_dir lib)
if(LIGER_PACKAGE_DIR)
  set(libraries_dir lib/torch-${LIGER_TORCH_MINOR})
endif()
include(CMakePackageConfigHelpers)
# torch is loaded before the library in Python; a C++ program finds it beside.
set(public_headers ops.h options.h backend.h nn/activation.h nn/distillation.h nn/embedding.h nn/experts.h nn/lora.h nn/loss.h nn/mixers.h nn/module.h nn/norm.h nn/policy.h nn/preference.h nn/rope.h nn/router.h nn/topk_distillation.h
    ops/activation/activate.h ops/activation/gated.h ops/loss/cross_entropy.h ops/head/options.h ops/loss/options.h ops/norm/norm.h ops/preference/distillation.h
    ops/optimizer/adamw.h ops/preference/policy.h ops/preference/preference.h core/eight_bit.h core/kernel.h core/math.h
    core/partial_sums.h)
if(LIGER_RESEARCH)
  list(APPEND public_headers research.h nn/research.h)
endif()
set(libraries liger)
if(TARGET liger_models)
  list(TRANSFORM model_headers PREPEND models/ OUTPUT_VARIABLE model_headers)
  list(APPEND public_headers ${model_headers})
  list(APPEND libraries liger_models)
endif()
set(here $ORIGIN)
if(APPLE)
  set(here @loader_path)
endif()
set(rpath "${here};${here}/../../torch/lib")
if(LIGER_PACKAGE_DIR)
  set(rpath "${here};${here}/..;${here}/../../../torch/lib")
endif()
set_target_properties(${libraries} PROPERTIES INSTALL_RPATH "${rpath}")
install(TARGETS ${libraries} liger_torch EXPORT liger LIBRARY DESTINATION ${prefix}${libraries_dir} RUNTIME DESTINATION ${prefix}${libraries_dir}
        ARCHIVE DESTINATION ${prefix}${libraries_dir})
if(TARGET liger_train)
  # In a wheel it stands beside the libraries of its torch, and python/liger_kernel/_train.py is what the path has.
  set(train_dir ${libraries_dir})
  if(NOT LIGER_PACKAGE_DIR)
    set(train_dir bin)
    set(rpath "${here}/../lib;${here}/../../torch/lib;${LIGER_TORCH_DIR}/lib")
  endif()
  set_target_properties(liger_train PROPERTIES INSTALL_RPATH "${rpath}")
  install(TARGETS liger_train RUNTIME DESTINATION ${prefix}${train_dir})
endif()
# The licences of what is inside ask to be there.
if(TARGET liger_models)
  foreach(name json pcre2 utf8proc cli11 gloo)
    if(liger_${name})
      file(GLOB licence ${liger_${name}}/LIC*)
      install(FILES ${licence} DESTINATION ${prefix}share/liger/licenses RENAME ${name}.txt)
    endif()
  endforeach()
endif()
# The public headers: the functions, the modules, what these include, and the formulas that their comments point to.
foreach(header ${public_headers})
  get_filename_component(folder ${header} DIRECTORY)
  install(FILES liger/${header} DESTINATION ${prefix}include/liger/${folder})
endforeach()
install(FILES ${PROJECT_BINARY_DIR}/include/liger/version.h DESTINATION ${prefix}include/liger)
install(EXPORT liger NAMESPACE liger:: FILE ligerTargets.cmake DESTINATION ${prefix}lib/cmake/liger/torch-${LIGER_TORCH_MINOR})
set(built_with_torch "")
if(NOT LIGER_PACKAGE_DIR)
  set(built_with_torch ${LIGER_TORCH_DIR})  # a wheel goes to other machines
endif()
configure_package_config_file(cmake/ligerConfig.cmake.in ${PROJECT_BINARY_DIR}/ligerConfig.cmake INSTALL_DESTINATION ${prefix}lib/cmake/liger)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/ligerConfigVersion.cmake COMPATIBILITY SameMajorVersion)
install(FILES ${PROJECT_BINARY_DIR}/ligerConfig.cmake ${PROJECT_BINARY_DIR}/ligerConfigVersion.cmake cmake/Torch.cmake
        DESTINATION ${prefix}lib/cmake/liger)
if(LIGER_PACKAGE_DIR)
  file(WRITE ${PROJECT_BINARY_DIR}/_build.py
       "\"\"\"Written by the build.\"\"\"\n\nVERSION = \"${LIGER_VERSION}\"\nCUDA = \"${cuda_built}\"\n")
  install(FILES ${PROJECT_BINARY_DIR}/_build.py DESTINATION ${LIGER_PACKAGE_DIR})
endif()
