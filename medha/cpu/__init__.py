"""Kernels of our own for the CPU, in C++: attention and what lies around it in a decoder's layer."""
