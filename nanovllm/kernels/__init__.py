"""C++ and Triton kernels. Delete this room and every answer stays the same, only slower."""
