//! Computes prompts and pushes their KV cache, layer by layer.
