# Adds the library sparse_attn_cpu: the kernels, which know neither Python nor torch.
set(kernels attend.cpp best.cpp compress.cpp entry.cpp isa.cpp limits.cpp memory.cpp merge.cpp parallel.cpp
  select.cpp select_lists.cpp select_merge.cpp select_rows.cpp store.cpp)
set(ops attend compress entry limits select)  # compiled once for each instruction set
set(instruction_sets portable)
set(portable "")  # options of each
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(avx2 -mavx2 -mfma -mf16c)
  # GCC 12's own AVX-512 headers set off these warnings.
  set(avx512 ${avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512
    -Wno-maybe-uninitialized -Wno-uninitialized)
  set(avx512_bf16 ${avx512} -mavx512bf16 -mavx512vnni -mavx512vbmi)
  set(amx_bf16 ${avx512_bf16} -mamx-tile -mamx-bf16 -mamx-int8)
  list(APPEND instruction_sets avx2 avx512 avx512_bf16 amx_bf16)
elseif(CMAKE_SYSTEM_PROCESSOR STREQUAL "aarch64" AND CMAKE_SYSTEM_NAME STREQUAL "Linux")
  # Not armv8.6-a: processors of armv8.4 have these extensions too.
  set(bf16 -march=armv8.2-a+dotprod+bf16+i8mm)
  set(sve256_bf16 ${bf16}+sve -msve-vector-bits=256)
  # Loads that GCC moves up before it hands registers out leave too few for the sums of a loop.
  set(portable $<$<CXX_COMPILER_ID:GNU>:-fno-schedule-insns>)
  set(neon_bf16 ${bf16} ${portable})
  list(APPEND instruction_sets neon_bf16 sve256_bf16)
endif()
foreach(isa IN LISTS instruction_sets)
  foreach(op IN LISTS ops)
    list(APPEND kernels ${op}_${isa}.cpp)
    set_source_files_properties("${CMAKE_CURRENT_LIST_DIR}/${op}_${isa}.cpp"
      PROPERTIES COMPILE_OPTIONS "${${isa}}")
  endforeach()
endforeach()
list(TRANSFORM kernels PREPEND "${CMAKE_CURRENT_LIST_DIR}/")

add_library(sparse_attn_cpu OBJECT ${kernels})
# Contracting a * b + c where it happens to be possible would make bits depend on how a loop was cut.
target_compile_options(sparse_attn_cpu PRIVATE -ffp-contract=off -Wno-psabi)
option(SPARSE_ATTN_AMX_MODEL "Replace AMX's instructions by a model: amx_bf16 runs, slowly, where avx512_bf16 does" OFF)
if(SPARSE_ATTN_AMX_MODEL)
  target_compile_definitions(sparse_attn_cpu PUBLIC SPARSE_ATTN_AMX_MODEL)
endif()
find_package(Threads REQUIRED)
target_link_libraries(sparse_attn_cpu PUBLIC Threads::Threads ${CMAKE_DL_LIBS})
