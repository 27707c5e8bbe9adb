// Facts of the driver and of a device's memory that need no open backend.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

namespace ds4 {

// Bytes that can still be allocated on a device. Throws std::runtime_error.
size_t cuda_free_memory(int device);

// Why kernels of this build do not run on a device (no driver, another architecture, broken); empty when they do. Makes
// the device's context.
std::string cuda_device_problem(int device);

// Newest CUDA that the driver speaks and the CUDA that this build was made with, "13.0"; the first is empty without a
// driver.
std::pair<std::string, std::string> cuda_runtime_versions();

}  // namespace ds4
