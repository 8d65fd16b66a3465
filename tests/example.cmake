# Installs libliger into a folder (PACKAGE of it, in a wheel's build), and builds and runs examples/train.cpp against it with find_package(liger),
# where there is no Python; compiles the headers, with LIGER_TESTS=all in the environment each alone; builds examples/backend, and tests it where PYTHON is.
set(prefix ${BUILD}/example/prefix)
file(REMOVE_RECURSE ${prefix})
if(PACKAGE)
  file(MAKE_DIRECTORY ${prefix})
  file(CREATE_LINK ${TORCH} ${prefix}/torch SYMBOLIC)  # as in a Python environment; otherwise the build's torch is known
endif()
set(flags -G Ninja -DCMAKE_PREFIX_PATH=${prefix}/${PACKAGE} -DCMAKE_DISABLE_FIND_PACKAGE_Python=ON -DCMAKE_DISABLE_FIND_PACKAGE_Python3=ON --no-warn-unused-cli)
set(headers -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=0)  # torch's are parsed once, and not by each
if("$ENV{LIGER_TESTS}" STREQUAL all)
  set(headers -DCMAKE_UNITY_BUILD=OFF)
endif()
foreach(step
    "${CMAKE_COMMAND};--install;${BUILD};--prefix;${prefix}"
    "${CMAKE_COMMAND};-S;${SOURCE}/examples;-B;${BUILD}/example/build;${flags}"
    "${CMAKE_COMMAND};--build;${BUILD}/example/build"
    "${BUILD}/example/build/train"
    "${CMAKE_COMMAND};-S;${SOURCE}/tests/installed;-B;${BUILD}/example/headers;-DVERSION=1.0;${headers};${flags}"
    "${CMAKE_COMMAND};--build;${BUILD}/example/headers"
    "${BUILD}/example/headers/uses")
  execute_process(COMMAND ${step} COMMAND_ERROR_IS_FATAL ANY)
endforeach()

# A backend that is plugged in.
foreach(step
    "${CMAKE_COMMAND};-S;${SOURCE}/examples/backend;-B;${BUILD}/example/backend;${flags}"
    "${CMAKE_COMMAND};--build;${BUILD}/example/backend")
  execute_process(COMMAND ${step} COMMAND_ERROR_IS_FATAL ANY)
endforeach()
if(PYTHON)
  execute_process(COMMAND ${CMAKE_COMMAND} -E env LIGER_LIBRARY=${BUILD}/libliger.so PYTHONPATH=${SOURCE}/python
                          ${PYTHON} ${SOURCE}/examples/backend/test.py ${BUILD}/example/backend/libliger_host.so COMMAND_ERROR_IS_FATAL ANY)
endif()

# The project of docs/cpp.md, in a folder with nothing in it.
if(MODELS)
  file(READ ${SOURCE}/docs/cpp.md page)
  foreach(block IN ITEMS "cmake|CMakeLists.txt" "cpp|finetune.cpp")
    string(REGEX MATCH "(.*)\\|(.*)" _ ${block})
    set(file ${CMAKE_MATCH_2})
    string(REGEX MATCH "```${CMAKE_MATCH_1}\n([^`]*)```" _ "${page}")
    file(WRITE ${BUILD}/example/documented/${file} "${CMAKE_MATCH_1}")
  endforeach()
  foreach(step
      "${CMAKE_COMMAND};-S;${BUILD}/example/documented;-B;${BUILD}/example/documented/build;${flags}"
      "${CMAKE_COMMAND};--build;${BUILD}/example/documented/build")
    execute_process(COMMAND ${step} COMMAND_ERROR_IS_FATAL ANY)
  endforeach()
endif()

# Nothing that is installed loads Python, and all of it finds what it needs.
file(GLOB_RECURSE binaries ${prefix}/${PACKAGE}/lib/*.so ${prefix}/${PACKAGE}/liger-train)
if(NOT CMAKE_HOST_APPLE)
  foreach(binary ${binaries} ${BUILD}/example/headers/uses)
    execute_process(COMMAND ldd ${binary} OUTPUT_VARIABLE loaded COMMAND_ERROR_IS_FATAL ANY)
    if(FETCHED AND loaded MATCHES "pcre2|utf8proc")
      message(FATAL_ERROR "${binary} needs a library that other machines may lack: ${loaded}")
    endif()
    if(loaded MATCHES "libpython|libtorch_python" OR NOT loaded MATCHES "libtorch_cpu.so =>" OR
       (binary MATCHES "liger-train|uses" AND loaded MATCHES "not found"))
      message(FATAL_ERROR "${binary} loads ${loaded}")
    endif()
    if(binary MATCHES "liger-train|uses" AND NOT loaded MATCHES "libstdc.*libtorch_cpu")
      message(FATAL_ERROR "${binary} loads torch before libstdc++, some of which torch has too: ${loaded}")
    endif()
  endforeach()
endif()
if(MODELS)
  file(GLOB_RECURSE train ${prefix}/${PACKAGE}/liger-train)
  execute_process(COMMAND ${train} --help OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
endif()

if(FETCHED AND NOT EXISTS ${prefix}/${PACKAGE}/share/liger/licenses/pcre2.txt)
  message(FATAL_ERROR "what is linked in has no licence in ${prefix}/${PACKAGE}")
endif()

# Another major version is refused, and so are components that there are not, as in a build without tokenizers or models.
set(refused "-DVERSION=2.0|version" "-DVERSION=1.0\\;-DCOMPONENTS=nothing|component nothing" "-DVERSION=1.0\\;-DCOMPONENTS=tokenizer|component tokenizer")
if(NOT MODELS)
  list(APPEND refused "-DVERSION=1.0\\;-DCOMPONENTS=models|component models")
endif()
file(REMOVE ${prefix}/${PACKAGE}/include/liger/models/tokenizer.h)
foreach(case IN LISTS refused)
  string(REGEX MATCH "(.*)\\|(.*)" _ "${case}")
  set(words ${CMAKE_MATCH_2})
  execute_process(COMMAND ${CMAKE_COMMAND} -S ${SOURCE}/tests/installed -B ${BUILD}/example/refused --fresh ${flags} ${CMAKE_MATCH_1}
                  RESULT_VARIABLE failed OUTPUT_QUIET ERROR_VARIABLE said)
  if(NOT failed OR NOT said MATCHES "${words}")
    message(FATAL_ERROR "find_package(liger) with ${case} must say \"${words}\": ${said}")
  endif()
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
