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

# Whatever names a torch is looked at, and what is wrong with it is said in words that fit.
set(old ${BUILD}/example/old)
file(WRITE ${old}/include/torch/headeronly/version.h "#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 10\n#define TORCH_VERSION_PATCH 1\n")
file(WRITE ${old}/include/torch/csrc/api/include/torch/torch.h "")
file(MAKE_DIRECTORY ${old}/share/cmake/Torch)
foreach(case IN ITEMS "-DLIGER_TORCH_DIR=/nowhere|finds none" "-DLIGER_TORCH_DIR=${old}|is torch 2.10.1" "-DTorch_DIR=${old}/share/cmake/Torch|is torch 2.10.1"
        "-DCMAKE_PREFIX_PATH=${prefix}/${PACKAGE},${old}/share/cmake|is torch 2.10.1")
  string(REGEX MATCH "(.*)\\|(.*)" _ ${case})
  set(words ${CMAKE_MATCH_2})
  string(REPLACE "," "\;" torch "${CMAKE_MATCH_1}")
  execute_process(COMMAND ${CMAKE_COMMAND} -S ${SOURCE}/examples -B ${BUILD}/example/refused --fresh ${flags} ${torch}
                  RESULT_VARIABLE failed OUTPUT_QUIET ERROR_VARIABLE said)
  string(REGEX REPLACE "[ \n]+" " " said "${said}")
  if(NOT failed OR NOT said MATCHES "${words}")
    message(FATAL_ERROR "find_package(liger) with ${torch} must say \"${words}\": ${said}")
  endif()
endforeach()
