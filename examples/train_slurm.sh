#!/usr/bin/env bash
# fusedce train over four nodes of eight GPUs. Not run on a cluster yet: take it as a start.
#SBATCH --job-name=fusedce-train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --signal=TERM@300
set -euo pipefail
: "${MODEL:?a folder of a Qwen3-MoE model, config.json and safetensors}" "${DATA:?a file or a folder of text}"

# SIGTERM before the time is over: all ranks end after the same step, with a checkpoint. torchrun kills what is still
# there 30 seconds later. Submitted again, the run goes on:
resume=()
if compgen -G "runs/$SLURM_JOB_NAME/step-*" >/dev/null; then resume=(--resume); fi

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# One launcher a node; it starts a process for each GPU.
srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 \
  --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$first:29500" \
  -m fusedce.train sft --out "runs/$SLURM_JOB_NAME" "${resume[@]}" \
  --hf "$MODEL" --data "$DATA" --seq-len 32768 --batch-size 64 --micro-batch 1 --model.moe-chunks 8 --model.moe-save plan
