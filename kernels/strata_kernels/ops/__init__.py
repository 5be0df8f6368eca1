"""The operators, one module or package each: formulas, kernels, host functions, reference, public function."""
