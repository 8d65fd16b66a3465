from liger_kernel.operators.loss import (
    LigerVocabParallelCEFunction,
    LigerVocabParallelCrossEntropy,
    validate_formula_and_mode,
)
