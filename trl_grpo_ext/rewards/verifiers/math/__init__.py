"""Grading of mathematical answers: extraction, normalisation, exact, numeric and symbolic comparison."""
