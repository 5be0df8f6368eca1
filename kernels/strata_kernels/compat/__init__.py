"""Strata under the names of other libraries, for programs that are written for those."""
