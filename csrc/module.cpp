// fusedce._C: importing it registers torch.ops.fusedce_native (ops/); its functions tell Python what was built.
#include <pybind11/pybind11.h>

#include <sstream>
#include <string>

#include "kernels/linear_ce_hopper.h"
#include "kernels/linear_ce_rows.h"

namespace py = pybind11;

namespace {

/// The words of a space-separated list, as setup.py passes them.
py::tuple words(const char* text) {
  py::list list;
  std::istringstream stream(text);
  for (std::string word; stream >> word;) list.append(word);
  return py::tuple(list);
}

py::dict build_info() {
  py::dict info;
  info["vendor"] = FUSEDCE_VENDOR;
  info["compiler"] = FUSEDCE_COMPILER;
  info["archs"] = words(FUSEDCE_ARCHS);
  info["torch"] = FUSEDCE_TORCH_VERSION;
  info["wave_size"] = fusedce::linear_ce_row_tile().wave_size;
  return info;
}

py::dict tile_table() {
  const fusedce::RowTile tile = fusedce::linear_ce_row_tile();
  py::dict rows;
  rows["threads"] = tile.threads;
  rows["vector_width"] = tile.vector_width;
  rows["unroll"] = tile.unroll;
  py::dict table;
  table["linear_ce_rows"] = rows;
  py::dict hopper;
  hopper["vocab"] = fusedce::hopper_vocab_tile();
  table["linear_ce_hopper"] = hopper;
  return table;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "Native kernels of fusedce: what was built.";
  module.def("build_info", &build_info, "vendor, compiler, archs, torch and wave_size of this build.");
  module.def("tile_table", &tile_table,
             "Constants of each kernel: threads a block, words a load, loads in flight; words of a tile.");
}
