// What every native op needs of torch around a launch: its device, its stream, its error.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

namespace fusedce {

/// Makes `device` current and calls start(stream) with torch's current stream on it. Device and stream come through
/// c10's device-generic interface, so that this compiles without CUDA or HIP headers and is the same code on both.
template <typename Start>
void launch_on(c10::Device device, const char* op, Start start) {
  const c10::DeviceGuard guard(device);
  const c10::impl::VirtualGuardImpl runtime(device.type());
  const char* error = start(runtime.getStreamNativeHandle(runtime.getStream(device)));
  TORCH_CHECK(error == nullptr, "fusedce_native.", op, ": the kernel did not start on ", device, ": ", error);
}

}  // namespace fusedce
