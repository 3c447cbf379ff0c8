// PyTorch asks two C++ objects about CUDA: the device guard (which device and which stream are current) and the CUDA
// hooks (is CUDA there, how many devices are there). A CPU build of PyTorch has neither, and therefore refuses even
// tensors that own no memory. This file supplies both, for one device with index 0. Nothing can run on it.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <new>

namespace c10::impl {

struct PretendedGuard final : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Device device() { return Device(DeviceType::CUDA, 0); }
  static Stream stream() { return Stream(Stream::DEFAULT, device()); }

  Device exchangeDevice(Device) const override { return device(); }
  Device getDevice() const override { return device(); }
  Stream getStream(Device) const noexcept override { return stream(); }
  Stream getDefaultStream(Device) const override { return stream(); }
  Stream getNewStream(Device, int) const override { return stream(); }
  Stream exchangeStream(Stream) const noexcept override { return stream(); }

  // Autograd records events and waits for them; where nothing runs there is nothing to wait for.
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

C10_REGISTER_GUARD_IMPL(CUDA, PretendedGuard)

} // namespace c10::impl

namespace at {

struct PretendedHooks final : CUDAHooksInterface {
  explicit PretendedHooks(CUDAHooksArgs) {}

  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
};

static_assert(sizeof(PretendedHooks) == sizeof(CUDAHooksInterface), "must fit in place");

} // namespace at

// Importing torch has made the hooks of a build without CUDA, and hooks cannot be registered twice. They have no data,
// so the pretended ones are constructed in their place.
extern "C" void install_pretended_hooks() {
  auto* hooks = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  new (hooks) at::PretendedHooks(at::CUDAHooksArgs{});
}
