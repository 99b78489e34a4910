//! Model files (GGUF, safetensors) as untrusted input.
