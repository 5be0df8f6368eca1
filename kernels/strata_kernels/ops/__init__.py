"""The operators, a file each: formulas, kernels, host functions, reference, registration, public function."""
