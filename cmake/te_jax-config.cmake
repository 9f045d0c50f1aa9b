# find_package(te_jax) with -Dte_jax_DIR=$(python -c "import te_jax; print(te_jax.get_cmake_dir())"): the target
# te_jax::te_jax, which brings te_jax.h and libte_jax.so. It needs no CUDA header.
if(NOT TARGET te_jax::te_jax)
  get_filename_component(_te_jax "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
  add_library(te_jax::te_jax SHARED IMPORTED)
  set_target_properties(te_jax::te_jax PROPERTIES
    IMPORTED_LOCATION "${_te_jax}/libte_jax.so"
    IMPORTED_SONAME libte_jax.so
    INTERFACE_INCLUDE_DIRECTORIES "${_te_jax}/include")
  unset(_te_jax)
endif()
