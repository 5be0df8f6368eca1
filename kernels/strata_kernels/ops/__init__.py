"""The operators, a file or package each: formulas, kernels, host functions, reference, `@operator`, public function."""
