# The sources of other projects that are built, or only included, with this one. They are the original archives that Debian's mirrors keep, each
# with its checksum, unpacked into LIGER_SOURCES_DIR, where every build of this tree finds them: no package of the machine and no root is needed,
# and what is built is the same on each. As a script (cmake -P) it fetches all of them.
option(LIGER_FETCH "Fetch the sources of other projects; OFF: take the libraries that the machine has" ON)
set(LIGER_SOURCES_DIR ${CMAKE_CURRENT_LIST_DIR}/../build/sources CACHE PATH "Where these sources are")
cmake_path(ABSOLUTE_PATH LIGER_SOURCES_DIR NORMALIZE)
set(LIGER_MIRRORS http://deb.debian.org/debian;https://deb.debian.org/debian;https://snapshot.debian.org/archive/debian/20251115T000000Z
    CACHE STRING "Where they come from: Debian's mirrors, tried in this order")
mark_as_advanced(LIGER_MIRRORS)

# The version, the checksum, the archive under pool/main, and what is unpacked of it.
set(liger_json_source 3.11.3 0d8ef5af7f9794e3263480193c491549b2ba6cc74bb018906202ada498a79406 n/nlohmann-json3/nlohmann-json3_3.11.3.orig.tar.gz
    */single_include */LICENSE.MIT)
set(liger_pcre2_source 10.46 8d28d7f2c3b970c3a4bf3776bcbb5adfc923183ce74bc8df1ebaad8c1985bd07 p/pcre2/pcre2_10.46.orig.tar.gz */src */deps */LICENCE.md)
set(liger_utf8proc_source 2.8.0 a0a60a79fe6f6d54e7d411facbfcc867a6e198608f2cd992490e46f04b1bcecc u/utf8proc/utf8proc_2.8.0.orig.tar.gz
    */utf8proc*.[ch] */LICENSE.md)
set(liger_cli11_source 2.4.1 0b8fbf2398875f15f30a675c7f412123a2aaa38df2863e991de72004fd5f1292 c/cli11/cli11_2.4.1+ds.orig.tar.xz */include */LICENSE)
set(liger_gloo_source 0.5.0 66d6fadb7b07cfcff08f74ae2acfab504e780d6b7536ee74d2011718cda25030 g/gloo/gloo_0.0~git20231202.5354032.orig.tar.xz
    gloo LICENSE)
set(liger_gtest_source 1.16.0 2f54382b5d13d6cd0be2afc524f1e510d37f8ba78c2d439c5bea64ef37e30d01 g/googletest/googletest_1.16.0.orig.tar.gz
    */googletest */CMakeLists.txt */LICENSE)

# Sets liger_<name> to the folder of each source that is named. Where one cannot be fetched, it is empty, and a warning says why.
function(liger_sources)
  file(MAKE_DIRECTORY ${LIGER_SOURCES_DIR})
  file(LOCK ${LIGER_SOURCES_DIR} DIRECTORY GUARD FUNCTION)  # builds may begin together
  set(missing "")
  foreach(name ${ARGN})
    list(GET liger_${name}_source 0 version)
    set(folder ${LIGER_SOURCES_DIR}/${name}-${version})
    set(liger_${name} ${folder} PARENT_SCOPE)
    if(NOT LIGER_FETCH)
      set(liger_${name} "" PARENT_SCOPE)
    elseif(NOT EXISTS ${folder})
      list(APPEND missing ${name}-${version})
    endif()
  endforeach()
  if(missing)
    list(JOIN missing ", " listed)
    list(GET LIGER_MIRRORS 0 mirror)
    message(STATUS "liger: fetching the sources of ${listed} from ${mirror} into ${LIGER_SOURCES_DIR}")
  endif()
  set(mirrors ${LIGER_MIRRORS})
  foreach(source ${missing})
    string(REGEX MATCH "^[a-z0-9]+" name ${source})
    set(wanted ${liger_${name}_source})
    list(POP_FRONT wanted version checksum path)
    set(reason "no mirror can be reached")
    foreach(mirror ${mirrors})
      set(archive ${LIGER_SOURCES_DIR}/${source}.archive)
      # EXPECTED_HASH would end the configuration, for which another mirror may have the right one.
      file(DOWNLOAD ${mirror}/pool/main/${path} ${archive} INACTIVITY_TIMEOUT 20 TIMEOUT 100 STATUS status)
      list(POP_FRONT status code reason)
      if(code MATCHES "^(5|6|7|28|35)$")
        list(REMOVE_ITEM mirrors ${mirror})  # which cannot be reached: nobody waits for it again
      endif()
      file(SHA256 ${archive} found)
      if(found STREQUAL checksum)
        set(unpacked ${LIGER_SOURCES_DIR}/${source}.unpacked)
        file(REMOVE_RECURSE ${unpacked})
        file(ARCHIVE_EXTRACT INPUT ${archive} DESTINATION ${unpacked} PATTERNS ${wanted})
        file(REMOVE ${archive})
        file(GLOB content ${unpacked}/*)
        list(LENGTH content several)  # most archives hold one folder
        if(several GREATER 1)
          set(content ${unpacked})
        endif()
        file(RENAME ${content} ${LIGER_SOURCES_DIR}/${source})
        file(REMOVE_RECURSE ${unpacked})
        break()
      elseif(code EQUAL 0)
        set(reason "the checksum is ${found}, not ${checksum}")
      endif()
      file(REMOVE ${archive})
    endforeach()
    if(NOT EXISTS ${LIGER_SOURCES_DIR}/${source})
      set(liger_${name} "" PARENT_SCOPE)
      message(WARNING "liger: ${source} could not be fetched (${reason}): what the machine has is taken, where it has one. LIGER_MIRRORS names \
other mirrors, LIGER_FETCH=OFF fetches nothing.")
    endif()
  endforeach()
endfunction()

if(CMAKE_SCRIPT_MODE_FILE STREQUAL CMAKE_CURRENT_LIST_FILE)
  liger_sources(json pcre2 utf8proc cli11 gloo gtest)
  return()
endif()

# The folder of a header, into a variable: in a source that was fetched, else on the machine.
macro(liger_header variable header folder)
  if(EXISTS "${folder}/${header}")
    set(${variable} ${folder})
  else()
    find_path(${variable} ${header} DOC "the folder that holds ${header}")
    mark_as_advanced(${variable})
  endif()
endmacro()

# A source as an archive that is linked into a library, of which nobody outside sees it.
macro(liger_archive name)
  if(NOT CMAKE_C_COMPILER AND NOT DEFINED ENV{CC})
    # The one that belongs to the C++ compiler, which may have another name than cc.
    get_filename_component(compiler ${CMAKE_CXX_COMPILER} NAME)
    string(REGEX REPLACE "clang\\+\\+" "clang" compiler ${compiler})
    string(REGEX REPLACE "g\\+\\+" "gcc" compiler ${compiler})
    string(REGEX REPLACE "c\\+\\+" "cc" compiler ${compiler})
    get_filename_component(folder ${CMAKE_CXX_COMPILER} DIRECTORY)
    find_program(CMAKE_C_COMPILER ${compiler} HINTS ${folder})
    if(NOT CMAKE_C_COMPILER)
      unset(CMAKE_C_COMPILER CACHE)
    endif()
  endif()
  enable_language(C)  # whose variables a function would lose
  add_library(${name} STATIC EXCLUDE_FROM_ALL ${ARGN})
  set_target_properties(${name} PROPERTIES C_VISIBILITY_PRESET hidden)
  target_compile_options(${name} PRIVATE $<IF:$<BOOL:${MSVC}>,/w,-w>)
endmacro()
