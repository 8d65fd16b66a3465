# Installs libliger into a folder (PACKAGE of it, in a wheel's build), builds examples/train.cpp against it with find_package(liger), and runs it.
set(prefix ${BUILD}/example/prefix)
foreach(step
    "${CMAKE_COMMAND};--install;${BUILD};--prefix;${prefix}"
    "${CMAKE_COMMAND};-S;${SOURCE}/examples;-B;${BUILD}/example/build;-G;Ninja;-DCMAKE_PREFIX_PATH=${prefix}/${PACKAGE};-DPython_EXECUTABLE=${PYTHON};-DCMAKE_BUILD_TYPE=Release"
    "${CMAKE_COMMAND};--build;${BUILD}/example/build"
    "${BUILD}/example/build/train")
  execute_process(COMMAND ${step} COMMAND_ERROR_IS_FATAL ANY)
endforeach()
