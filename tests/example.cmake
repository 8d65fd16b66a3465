# Installs libliger into a folder (PACKAGE of it, in a wheel's build), and builds and runs examples/train.cpp against it with find_package(liger),
# where there is no Python; compiles each header alone.
set(prefix ${BUILD}/example/prefix)
file(REMOVE_RECURSE ${prefix})
if(PACKAGE)
  file(MAKE_DIRECTORY ${prefix})
  file(CREATE_LINK ${TORCH} ${prefix}/torch SYMBOLIC)  # as in a Python environment; otherwise the build's torch is known
endif()
set(flags -G Ninja -DCMAKE_PREFIX_PATH=${prefix}/${PACKAGE} -DCMAKE_DISABLE_FIND_PACKAGE_Python=ON -DCMAKE_DISABLE_FIND_PACKAGE_Python3=ON --no-warn-unused-cli)
foreach(step
    "${CMAKE_COMMAND};--install;${BUILD};--prefix;${prefix}"
    "${CMAKE_COMMAND};-S;${SOURCE}/examples;-B;${BUILD}/example/build;-DCMAKE_BUILD_TYPE=Release;${flags}"
    "${CMAKE_COMMAND};--build;${BUILD}/example/build"
    "${BUILD}/example/build/train"
    "${CMAKE_COMMAND};-S;${SOURCE}/tests/installed;-B;${BUILD}/example/headers;${flags}"
    "${CMAKE_COMMAND};--build;${BUILD}/example/headers")
  execute_process(COMMAND ${step} COMMAND_ERROR_IS_FATAL ANY)
endforeach()

# What is missing is said in words that fit.
file(WRITE ${BUILD}/example/old/include/torch/headeronly/version.h "#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 10\n#define TORCH_VERSION_PATCH 1\n")
foreach(case IN ITEMS "/nowhere|finds none" "${BUILD}/example/old|was built for torch")
  string(REPLACE "|" ";" case ${case})
  list(GET case 0 torch)
  list(GET case 1 words)
  execute_process(COMMAND ${CMAKE_COMMAND} -S ${SOURCE}/examples -B ${BUILD}/example/refused --fresh ${flags} -DLIGER_TORCH_DIR=${torch}
                  RESULT_VARIABLE failed OUTPUT_QUIET ERROR_VARIABLE said)
  string(REGEX REPLACE "[ \n]+" " " said "${said}")
  if(NOT failed OR NOT said MATCHES "${words}")
    message(FATAL_ERROR "find_package(liger) with torch in ${torch} must say \"${words}\": ${said}")
  endif()
endforeach()
