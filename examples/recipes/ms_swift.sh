#!/usr/bin/env bash
# LoRA on conversations with ms-swift: bash examples/recipes/ms_swift.sh [options that replace those below]
swift sft \
  --model Qwen/Qwen3-0.6B \
  --dataset AI-ModelScope/alpaca-gpt4-data-en \
  --output_dir out/ms-swift \
  --use_liger_kernel true \
  --tuner_type lora \
  --target_modules all-linear \
  --lora_rank 16 \
  --max_length 2048 \
  --per_device_train_batch_size 1 \
  --gradient_accumulation_steps 8 \
  --num_train_epochs 1 \
  --learning_rate 2e-4 \
  --torch_dtype bfloat16 \
  --logging_steps 10 \
  "$@"
