// What DLPack 1 says of a tensor, and the functions by which torch tells it: their layout in memory is a public standard, so
// neither torch's headers nor DLPack's are needed, and one binary serves every torch that has them.
#pragma once
#include <cstdint>

namespace rlkernel::dlpack {

enum Device : int32_t { kCpu = 1, kCuda = 2, kRocm = 10 };
enum Code : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6 };

struct Type {
  uint8_t code, bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  Type dtype;
  int64_t *shape, *strides;  // the tensor's own, in elements
  uint64_t byte_offset;
};

// torch.Tensor.__dlpack_c_exchange_api__ is a capsule that holds a pointer to one.
struct ExchangeApi {
  uint32_t major, minor;
  ExchangeApi* previous;
  void *allocate, *take, *give;
  int (*read)(void* object, Tensor* out);  // an object of Python; lends, and takes no reference. -1: Python's error is set
  void* stream;
};

constexpr const char* kExchangeAttribute = "__dlpack_c_exchange_api__";
constexpr const char* kExchangeCapsule = "dlpack_exchange_api";

}  // namespace rlkernel::dlpack
