# Toolchain of the program that has Vulkan's shaders compiled, which CMake takes from the environment of the build. It
# runs for a second; llama.cpp would compile it with -O3 for more than a minute.
set(CMAKE_CXX_FLAGS_RELEASE "-O0" CACHE STRING "")
