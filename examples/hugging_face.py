"""A `transformers.Trainer` is trained by servers and goes on from its own checkpoints, bit for bit.

    kvdist-launch -n 2 -s 2 python examples/hugging_face.py 1    # one epoch, saved in run-0 and run-1
    kvdist-launch -n 2 -s 2 python examples/hugging_face.py 2    # the second epoch

Needs `pip install transformers accelerate`. Each worker saves into a folder of its own.
"""

import sys

import torch
import transformers

from kvdist import Trainer, kv


class Distributed(transformers.Trainer):
    def create_optimizer(self, *args, **kwargs):
        if self.optimizer is None:
            adamw = super().create_optimizer(*args, **kwargs)
            self.optimizer = Trainer(self.model.parameters(), adamw, kvstore=store, clip_norm=1.0).as_torch_optimizer()
        return self.optimizer


store = kv.create("dist")
torch.manual_seed(0)
shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=40, **shape))
examples = [{"input_ids": ids, "labels": ids.sum() % 2} for ids in torch.randint(0, 40, (40, 8))]
folder = f"run-{store.rank}"
arguments = transformers.TrainingArguments(
    folder,
    num_train_epochs=int(sys.argv[1]),
    per_device_train_batch_size=4,
    lr_scheduler_type="constant_with_warmup",
    warmup_steps=3,
    max_grad_norm=0,  # its default of 1 clips each worker's own gradient; clip_norm clips the mean
    save_strategy="epoch",
    report_to=[],
    use_cpu=True,
)
loop = Distributed(model, arguments, train_dataset=examples[store.rank :: store.num_workers])
loop.train(resume_from_checkpoint=transformers.trainer_utils.get_last_checkpoint(folder))  # None at first
store.close()
