// The arguments of the divergence kernels in Python.
#pragma once
#include "rlkernel/divergence/arguments.h"
#include "rlkernel/rows_bind.h"

namespace rlkernel::calls {

struct DivergenceFields {
  using shared_fields = DivergenceFields;
  Tensor logits, teacher_logits;
  Optional mask;
  double beta, temperature;

  DivergenceRows rows() const {
    const StridedRowsOf student(logits), teacher(teacher_logits);
    if (student.count != teacher.count || student.length != teacher.length) teacher_logits.refuse_shape_of(logits);
    return {student.count, student.length, student.of(logits), teacher.of(teacher_logits), logits.dtype(),
            teacher_logits.dtype(), mask.dense<const uint8_t>(student.count), beta, temperature};
  }

  void want_part(const Tensor& student_part) const {
    if (student_part.given == (beta == 0))
      student_part.refuse(beta == 0 ? "be None where beta is 0" : "be given where beta is not 0",
                          student_part.given ? "a tensor" : "None");
  }
};

RLKERNEL_FIELDS(DivergenceFields, logits, teacher_logits, mask, beta, temperature)

struct divergence_forward {
  DivergenceFields pair;
  Tensor divergence;
  Optional entropy;
  Tensor row_max, sum_exp, teacher_max, teacher_sum_exp;
  Optional student_part;

  template <class Launch>
  int run(Launch launch, void* stream) const {
    const DivergenceRows rows = pair.rows();
    pair.want_part(student_part);
    const auto written = [&](const Tensor& x) { return x.dense<float>(rows.rows); };
    return launch({rows, written(divergence), written(entropy), written(row_max), written(sum_exp), written(teacher_max),
                   written(teacher_sum_exp), written(student_part)},
                  stream);
  }
};

RLKERNEL_FIELDS(divergence_forward, pair, divergence, entropy, row_max, sum_exp, teacher_max, teacher_sum_exp, student_part)

struct divergence_backward {
  DivergenceFields pair;
  Tensor grad, row_max, sum_exp, teacher_max, teacher_sum_exp;
  Optional student_part;
  Tensor out;

  template <class Launch>
  int run(Launch launch, void* stream) const {
    const DivergenceRows rows = pair.rows();
    pair.want_part(student_part);
    const auto read = [&](const Tensor& x) { return x.dense<const float>(rows.rows); };
    return launch({rows, read(grad), read(row_max), read(sum_exp), read(teacher_max), read(teacher_sum_exp),
                   read(student_part), StridedRowsOf(pair.logits).into(out)},
                  stream);
  }
};

RLKERNEL_FIELDS(divergence_backward, pair, grad, row_max, sum_exp, teacher_max, teacher_sum_exp, student_part, out)

}  // namespace rlkernel::calls
