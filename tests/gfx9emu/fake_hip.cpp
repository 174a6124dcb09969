// What libamdhip64 is to code that clang built for HIP: fat binaries are registered, kernels are launched. A launch
// goes to one function, which Python gives (hip.py); nothing here knows a GPU.
#include <cstddef>
#include <map>
#include <string>

namespace {

struct Dim3 {
  unsigned x, y, z;
};

/// What clang puts beside a fat binary.
struct Wrapper {
  unsigned magic, version;
  const void* binary;
  void* unused;
};

struct Kernel {
  std::string name;
  const void* binary;
};

struct Configuration {
  Dim3 grid, block;
  std::size_t shared;
  void* stream;
};

using OnLaunch = int (*)(const char* name, const void* binary, const unsigned* grid, const unsigned* block,
                         std::size_t shared, void** arguments);

// A function, for registration runs before this file's own globals may exist.
std::map<const void*, Kernel>& kernels() {
  static std::map<const void*, Kernel> all;
  return all;
}

OnLaunch on_launch = nullptr;
Configuration configuration;
int last_error = 0;

}  // namespace

extern "C" {

void fake_hip_on_launch(OnLaunch function) { on_launch = function; }

void** __hipRegisterFatBinary(const void* wrapper) {
  return new void*(const_cast<void*>(static_cast<const Wrapper*>(wrapper)->binary));
}

void __hipUnregisterFatBinary(void** module) { delete module; }

void __hipRegisterFunction(void** module, const void* host, char*, const char* name, unsigned, void*, void*, void*,
                           void*, int*) {
  kernels()[host] = {name, *module};
}

// A launch `kernel<<<…>>>` pushes its configuration, and the stub of the kernel pops it.
int __hipPushCallConfiguration(Dim3 grid, Dim3 block, std::size_t shared, void* stream) {
  configuration = {grid, block, shared, stream};
  return 0;
}

int __hipPopCallConfiguration(Dim3* grid, Dim3* block, std::size_t* shared, void** stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *stream = configuration.stream;
  return 0;
}

int hipLaunchKernel(const void* host, Dim3 grid, Dim3 block, void** arguments, std::size_t shared, void*) {
  const Kernel& kernel = kernels().at(host);
  const unsigned grid_sizes[3] = {grid.x, grid.y, grid.z};
  const unsigned block_sizes[3] = {block.x, block.y, block.z};
  // A test that does not ask for its error leaves none to the next one.
  last_error = on_launch(kernel.name.c_str(), kernel.binary, grid_sizes, block_sizes, shared, arguments);
  return last_error;
}

int hipGetLastError() {
  const int error = last_error;
  last_error = 0;
  return error;
}

const char* hipGetErrorString(int) { return "the emulator stopped the kernel"; }
}
