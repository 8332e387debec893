# The torch extension `_C.abi.so`: finds torch through a Python interpreter.
find_package(Python REQUIRED COMPONENTS Interpreter)

# Asks the interpreter instead of using find_package(Torch): that package pulls
# in the whole CUDA toolchain and flags that the stable ABI does not need.
execute_process(
  COMMAND ${Python_EXECUTABLE} -c "
import os, torch
print(os.path.dirname(torch.__file__), torch.__version__, torch.version.cuda or '-')"
  OUTPUT_VARIABLE torch_facts ERROR_VARIABLE torch_error RESULT_VARIABLE torch_status
  OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT torch_status EQUAL 0)
  message(FATAL_ERROR "${Python_EXECUTABLE} cannot import torch: ${torch_error}")
endif()
string(REGEX MATCH "^(.*) ([^ ]+) ([^ ]+)$" _ "${torch_facts}")
set(torch_dir "${CMAKE_MATCH_1}")
set(torch_version "${CMAKE_MATCH_2}")
set(torch_cuda "${CMAKE_MATCH_3}")
message(STATUS "torch ${torch_version} (CUDA: ${torch_cuda}) in ${torch_dir}")
if(torch_version VERSION_LESS 2.11)
  message(FATAL_ERROR "torch ${torch_version} is older than 2.11")
endif()

set(with_cuda OFF)
if(KVP_CUDA STREQUAL "AUTO")
  if(NOT torch_cuda STREQUAL "-")
    include(CheckLanguage)
    check_language(CUDA)
    if(CMAKE_CUDA_COMPILER)
      set(with_cuda ON)
    endif()
  endif()
else()
  set(with_cuda ${KVP_CUDA})
endif()
if(with_cuda AND torch_cuda STREQUAL "-")
  message(FATAL_ERROR "KVP_CUDA=${KVP_CUDA}, but torch ${torch_version} has no CUDA")
endif()

# MODULE: loaded by torch.ops.load_library, never linked against. It does not
# link libpython either, so one file serves every Python version.
add_library(kvp_C MODULE
  csrc/page_copy.cpp csrc/bulk_copy.cpp csrc/assign.cpp csrc/dci.cpp
  csrc/retrieve.cpp csrc/svd.cpp csrc/components.cpp csrc/zoom.cpp
  csrc/paged_decode.cpp csrc/page_votes.cpp csrc/host_memory.cpp csrc/quantized_rows.cpp
  csrc/threads.cpp csrc/unselected.cpp)
set_target_properties(kvp_C PROPERTIES
  PREFIX "" OUTPUT_NAME "_C.abi" SUFFIX ".so"
  LIBRARY_OUTPUT_DIRECTORY "${KVP_OUTPUT_DIR}"
  CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
  # torch is in the process already when the library is loaded; a path to the
  # torch of the build machine would only be wrong elsewhere.
  SKIP_BUILD_RPATH ON)
# SYSTEM: warnings of torch's headers are not ours.
target_include_directories(kvp_C SYSTEM PRIVATE "${torch_dir}/include")
target_compile_definitions(kvp_C PRIVATE
  TORCH_TARGET_VERSION=0x020b000000000000ULL
  KVP_BUILD_TYPE="${CMAKE_BUILD_TYPE}" KVP_TORCH_VERSION="${torch_version}")
target_link_directories(kvp_C PRIVATE "${torch_dir}/lib")
target_link_libraries(kvp_C PRIVATE kvp_core torch_cpu)
# A symbol that torch lacks must fail here, not at the first import.
target_link_options(kvp_C PRIVATE
  -Wl,--no-undefined -Wl,--allow-shlib-undefined)

if(with_cuda)
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 80 90)
  endif()
  enable_language(CUDA)
  # CMake up to 3.25 knows no flag of nvcc's for C++20
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
  endif()
  find_package(CUDAToolkit REQUIRED)
  target_sources(kvp_C PRIVATE csrc/page_copy.cu csrc/bulk_copy.cu
    csrc/page_votes.cu csrc/svd.cu csrc/assign.cu csrc/host_memory.cu)
  set_target_properties(kvp_C PROPERTIES
    CUDA_VISIBILITY_PRESET hidden CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON
    # the target is older than the variable, whose value it would take
    CUDA_ARCHITECTURES "${CMAKE_CUDA_ARCHITECTURES}"
    CUDA_RUNTIME_LIBRARY Shared)
  target_compile_definitions(kvp_C PRIVATE USE_CUDA KVP_WITH_CUDA)
  target_link_libraries(kvp_C PRIVATE torch_cuda CUDA::cudart)
endif()
message(STATUS "kvp: CUDA kernels ${with_cuda}, OpenMP ${kvp_openmp_found}")
