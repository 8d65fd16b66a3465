"""What replaces parts of Hugging Face's models: which forward stands for which source, and how it is put in its place.

A call of `apply_liger_kernel_to_llama(model=model)` reads, in this order: `families` has the row of the family,
`by_source` its swaps, `formulas` what stands for a class by its source, `part` under which conditions, `place` how it
is put on a module, `apply` walks over the model, and `report` makes the replacements and lists them.
"""
