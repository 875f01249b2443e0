"""The default command on data sets that nobody prepared, beside what people use instead."""
