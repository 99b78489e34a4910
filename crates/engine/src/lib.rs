//! Model graphs, kernels and the sampler.
