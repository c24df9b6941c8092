import type { MemoryBlock } from "../messages";

/** Labels of a bar's segments: memory of tensors, unused memory of torch's allocator, memory of other processes. */
const SEGMENTS = ["used", "reserved, unused", "other processes"];

function Cells({ texts }: { texts: readonly string[] }) {
  return (
    <>
      {texts.map((text, index) => (
        <td key={index}>{text}</td>
      ))}
    </>
  );
}

/** Memory use when an allocation failed: a row for each rank, then the largest tensors of the rank that failed. */
export function Memory({ memory }: { memory: MemoryBlock }) {
  return (
    <div class="sgpu-memory" aria-label={memory.title} role="group">
      {memory.title}
      <table class="sgpu-ranks">
        <thead>
          <tr>
            {memory.heads.map((head) => (
              <th key={head}>{head}</th>
            ))}
          </tr>
        </thead>
        <tbody>
          {memory.rows.map(({ rank, cells, shares, culprit }) => (
            <tr key={rank} class={culprit ? "sgpu-culprit" : ""}>
              <td>{rank}</td>
              <Cells texts={cells} />
              <td>
                <div class="sgpu-shares">
                  {shares.map((share, index) => (
                    <i key={index} title={SEGMENTS[index]} style={{ width: `${share * 100}%` }} />
                  ))}
                </div>
              </td>
            </tr>
          ))}
        </tbody>
      </table>
      {memory.more && <div>{memory.more}</div>}
      {memory.tensors.length > 0 && (
        <>
          {memory.largest}
          <table>
            <tbody>
              {memory.tensors.map(({ name, cells }, index) => (
                <tr key={index}>
                  <td>{name}</td>
                  <Cells texts={cells} />
                </tr>
              ))}
            </tbody>
          </table>
        </>
      )}
    </div>
  );
}
