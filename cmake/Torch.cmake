# What a build and find_package(liger) need of torch: its headers and libraries. Its own CMake package brings its CUDA flags and
# architectures with it.

# The version of the torch in a folder, such as 2.13.0; nothing where there is none.
function(liger_torch_version folder result)
  set(version "")
  foreach(header include/torch/headeronly/version.h include/torch/csrc/api/include/torch/version.h)
    if(NOT version AND EXISTS "${folder}/${header}")
      file(STRINGS "${folder}/${header}" version REGEX "^#define TORCH_VERSION_(MAJOR|MINOR|PATCH) [0-9]+")
      list(TRANSFORM version REPLACE ".* " "")
      list(JOIN version "." version)
    endif()
  endforeach()
  set(${result} "${version}" PARENT_SCOPE)
endfunction()

# 2.13 of 2.13.0: what a library built for torch 2.13.0 runs with.
function(liger_torch_minor version result)
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" minor "${version}")
  set(${result} "${minor}" PARENT_SCOPE)
endfunction()

# What comes before torch's libraries on a command line. They hold, and show to others, the std::filesystem of another GCC: a program that
# takes part of it from there and the rest from libstdc++ crashes. Where a toolchain has libstdc++ as an archive only, what is taken from it
# stays inside.
set(liger_libstdcxx $<$<AND:$<PLATFORM_ID:Linux>,$<LINK_LANG_AND_ID:CXX,GNU>>:-Wl$<COMMA>--exclude-libs$<COMMA>libstdc++.a$<COMMA>--push-state$<COMMA>--no-as-needed$<COMMA>-lstdc++$<COMMA>--pop-state>)

# Lets an interface target hand over the torch in a folder.
function(liger_link_torch target folder)
  foreach(include include include/torch/csrc/api/include)
    target_include_directories(${target} SYSTEM INTERFACE $<BUILD_INTERFACE:${folder}/${include}>)
  endforeach()
  set(kind SHARED)
  if(WIN32)
    set(kind IMPORT)
  endif()
  target_link_libraries(${target} INTERFACE ${liger_libstdcxx})
  foreach(name torch torch_cpu c10)
    target_link_libraries(${target} INTERFACE $<BUILD_INTERFACE:${folder}/lib/${CMAKE_${kind}_LIBRARY_PREFIX}${name}${CMAKE_${kind}_LIBRARY_SUFFIX}>)
  endforeach()
endfunction()
