#include "targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  vcattn::io::fuzz::check_safetensors(std::as_bytes(std::span(data, size)));
  return 0;
}
